"""Which runs may bound the rows that experts work on at a time, and what bound their memory allows."""

from types import SimpleNamespace

import pytest

from megatron_lancet.errors import UsageError
from megatron_lancet.features.row_bound import feature as row_bound
from megatron_lancet.features.row_bound.feature import (
    NoBound,
    ReceivedRows,
    RowBoundFlags,
    RowLimitChoice,
    bound_of_memory,
    check_row_limit,
    most_rows,
)
from megatron_lancet.planning.sizes.saved_tensors import expert_row_bytes
from megatron_lancet.report.summary import StepRecord, rank_medians, summarise
from megatron_lancet.runtime.comm import CommSettings
from megatron_lancet.runtime.comm_stats import CommTimes, SplitChunk
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.plan import fixed_plan, paired
from tests.unit.training.configs import config_with

PLAN = fixed_plan(2)


def args_of(**changes: object) -> SimpleNamespace:
    settings = {
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "moe_pad_expert_input_to_capacity": False,
        "distributed_backend": "gloo",
        "micro_batch_size": 2,
        "seq_length": 64,
        "moe_router_topk": 4,
        "num_experts": 4,
        "hidden_size": 32,
        "moe_latent_size": None,
        "moe_ffn_hidden_size": 64,
        "recompute_granularity": None,
        "recompute_modules": None,
        "swiglu": False,
        "quick_geglu": False,
        "bf16": True,
        "fp16": False,
        "curr_iteration": 4,
    }
    return SimpleNamespace(**{**settings, **changes})


@pytest.mark.parametrize(
    ("limit", "changes", "plan", "message"),
    [
        (8, {"expert_model_parallel_size": 1}, None, r"-rows 8 bounds .* --expert-model-parallel-size is 1 .* Drop"),
        (8, {}, None, r"this run has stock Megatron modules, .* Drop it, or --lancet-plan off"),
        ("auto", {"moe_pad_expert_input_to_capacity": True}, PLAN, r"-rows auto would change nothing: .* equally many"),
        (8, {"distributed_backend": "mock"}, PLAN, r"in a mocked world only one rank exists. Drop it, or start"),
    ],
)
def test_a_limit_that_a_run_can_not_follow_is_refused(limit, changes, plan, message):
    config = config_with(RowBoundFlags(RowLimitChoice.AUTO if limit == "auto" else limit))
    with pytest.raises(UsageError, match=message):
        check_row_limit(args_of(**changes), config, plan)


def test_runs_without_the_flag_and_those_that_can_follow_it_pass():
    check_row_limit(args_of(expert_model_parallel_size=1), config_with(), None)
    for limit in (1, RowLimitChoice.AUTO):
        check_row_limit(args_of(), config_with(RowBoundFlags(limit)), PLAN)


def record(num_chunks: int, num_rows: int) -> StepRecord:
    return StepRecord(100.0, 64, CommTimes(num_chunks=num_chunks, num_expert_rows=num_rows))


def test_the_bound_is_what_fits_if_all_kept_chunks_grow_to_it():
    """Two steps of two micro-batches with four chunks each, of 100 rows; 10 bytes a row; two more chunks at work."""
    records = [record(8, 800), record(8, 800)]
    one = bound_of_memory(records, 10.0, num_micro_batches=2, num_in_flight=1, room_bytes=6_000)
    assert one == 100 + 0.9 * 6_000 / (10 * (4 + 2))
    both = bound_of_memory(records, 10.0, num_micro_batches=2, num_in_flight=2, room_bytes=6_000)
    assert both == 100 + 0.9 * 6_000 / (10 * (8 + 2))
    assert bound_of_memory(records, 10.0, 2, 1, room_bytes=0) == 100
    assert bound_of_memory([record(8, 0)], 10.0, 2, 1, room_bytes=0) == 1
    assert bound_of_memory([record(0, 0)], 10.0, 2, 1, room_bytes=9) is None


def test_most_rows_are_all_tokens_times_experts_of_a_rank():
    assert most_rows(args_of(), config_with()) == 128 * 2 * 2  # of four experts of a token two are on a rank
    assert most_rows(args_of(tensor_model_parallel_size=2, sequence_parallel=True), config_with()) == 64 * 2 * 2
    holders = args_of(tensor_model_parallel_size=2, expert_tensor_parallel_size=2, sequence_parallel=True)
    assert most_rows(holders, config_with()) == 64 * 4 * 2


def test_a_row_keeps_its_token_and_what_is_inside_the_expert():
    assert expert_row_bytes(args_of()) == 2 * (32 + 64 + 64)
    assert expert_row_bytes(args_of(recompute_granularity="full")) == 2 * 32
    assert expert_row_bytes(args_of(recompute_modules=["moe"])) == 2 * 32


class Run:
    """Steps of a run on rank 0 of two, of which the other one has another bound."""

    def __init__(self, monkeypatch, limit, others_bound, room_bytes=10_000, plan=PLAN) -> None:
        self.said: list[str] = []
        self.limits: list[int | None] = []
        self.is_settled = True
        self.comm = SimpleNamespace(stats=SimpleNamespace(first_split=None), settings=CommSettings())
        self.setup = SimpleNamespace(plan=plan, stages=[SimpleNamespace(decoder=SimpleNamespace(comm=self.comm))])
        monkeypatch.setattr(row_bound, "limit_rows", lambda _, limit: self.limits.append(limit))
        self.recorder = SimpleNamespace(num_steps=0, records=[record(4, 400)] * 5)
        monkeypatch.setattr(row_bound, "say", self.said.append)
        monkeypatch.setattr(row_bound.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(row_bound, "get_num_microbatches", lambda: 2)
        monkeypatch.setattr(row_bound, "least_room_bytes", lambda _: room_bytes)
        monkeypatch.setattr(row_bound, "from_all_ranks", lambda own: [own, others_bound, None])
        self.args = args_of()
        self.rows = ReceivedRows(
            self.args, config_with(RowBoundFlags(limit)), self.setup, self.recorder, "cpu", lambda: self.is_settled
        )

    def step(self, skipped: int = 0) -> None:
        def run() -> tuple[dict[str, object], int]:
            self.recorder.num_steps += 1
            return {}, skipped

        self.rows.observe(run)


def test_smallest_bound_of_all_ranks_is_measured_once(monkeypatch):
    run = Run(monkeypatch, RowLimitChoice.AUTO, others_bound=107)
    run.is_settled = False
    run.step()
    run.is_settled = True
    run.step()
    assert run.limits == []
    for _ in range(4):
        run.step()
    assert run.limits == [107]
    assert run.said == [
        "Megatron-Lancet received rows: at most 107 of a chunk on a rank at a time, for which the 0 MB that are free "
        "on every rank are enough"
    ]


def test_a_new_plan_runs_without_the_bound_of_the_last_one(monkeypatch):
    run = Run(monkeypatch, RowLimitChoice.AUTO, others_bound=107)
    for _ in range(3):
        run.step()
    run.is_settled = False
    run.step()
    run.step()
    assert run.limits == [107, None]
    run.is_settled, run.recorder.num_steps = True, 0  # the recorder restarts with a plan
    for _ in range(4):
        run.step()
    assert run.limits == [107, None, 107]


def test_a_given_bound_stays_while_a_plan_is_sought(monkeypatch):
    run = Run(monkeypatch, 300, others_bound=1)
    run.is_settled = False
    run.step()
    assert run.limits == []


def test_steps_that_fp16_skips_are_not_measured(monkeypatch):
    """A step counts as skipped if any rank has skipped it."""
    run = Run(monkeypatch, RowLimitChoice.AUTO, others_bound=107)
    bounds, other_skips = row_bound.from_all_ranks, False
    monkeypatch.setattr(
        row_bound, "from_all_ranks", lambda own: [own, other_skips] if isinstance(own, bool) else bounds(own)
    )
    run.args.fp16 = True
    for _ in range(5):
        run.step(skipped=1)
    other_skips = True
    run.step()
    other_skips = False
    run.step()
    run.step()
    assert run.limits == []
    run.step()
    assert run.limits == [107]


@pytest.mark.parametrize(("plan", "expected"), [(PLAN, 100 + 9_000 // (320 * 4)), (paired(PLAN), 100 + 9_000 // 1920)])
def test_pairs_keep_two_micro_batches(monkeypatch, plan, expected):
    run = Run(monkeypatch, RowLimitChoice.AUTO, others_bound=400, plan=plan)
    for _ in range(3):
        run.step()
    assert run.limits == [expected]


def test_no_bound_is_set_where_all_rows_fit_on_a_rank(monkeypatch):
    run = Run(monkeypatch, RowLimitChoice.AUTO, others_bound=10**9, room_bytes=10**9)
    for _ in range(3):
        run.step()
    assert run.limits == [None]
    assert "no bound is needed, because all 512 rows of a micro-batch fit on one rank" in run.said[0]


def test_the_first_split_chunk_is_told_once(monkeypatch):
    run = Run(monkeypatch, 300, others_bound=1)
    run.step()
    assert run.said == []
    run.comm.settings = CommSettings(max_expert_rows=300)
    run.comm.stats.first_split = SplitChunk(Op.parse("L2.c1.F.dispatch"), num_rounds=3, num_rows=700, rank=1)
    for _ in range(5):
        run.step()
    assert run.limits == []
    assert len(run.said) == 1
    assert "in step 5 L2.c1.F.dispatch" in run.said[0]
    assert "would exceed the limit on EP rank 1 (700 > 300 rows); sent in 3 rounds" in run.said[0]


def report_of_received_rows(*comms: CommTimes, bound: int | None) -> str:
    ranks = [
        rank_medians([StepRecord(100.0, 64, comm) for comm in comms]),
        rank_medians([StepRecord(1.0, 64, comms[0])]),
    ]
    report = {**summarise(ranks, "plan", len(comms)), "max_expert_rows": bound}
    return "\n".join(NoBound().lines(report))


def test_chunks_in_rounds_are_told_with_steps_and_the_most_rows():
    quiet, busy_once = CommTimes(num_chunks=8, peak_expert_rows=120), CommTimes(num_chunks=8, peak_expert_rows=300)
    busy = CommTimes(num_chunks=8, peak_expert_rows=300, num_split_chunks=3, num_split_steps=1, most_rounds=4)
    assert (
        "received rows      at most 300 of a chunk on a rank at a time, 300 are allowed; 6 of 24 chunks, in 2 of 3 "
        "steps, went in up to 4 rounds" in report_of_received_rows(quiet, busy, busy, bound=300)
    )
    text = report_of_received_rows(quiet, quiet, bound=300)
    assert "at most 120 of a chunk on a rank at a time, 300 are allowed; no chunk had more" in text
    text = report_of_received_rows(busy_once, quiet, bound=200)
    assert "at most 300 of a chunk on a rank at a time before the bound was measured, 200 are allowed; no chunk" in text
    assert "received rows" not in report_of_received_rows(quiet, bound=None)
