"""Which runs get a plan, and which are refused with the line that says what to drop."""

import sys

import pytest

from megatron_lancet.config import LancetConfig, PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.schedule.plan import DwPolicy, Plan
from megatron_lancet.training.plan_choice import choose_plan


@pytest.fixture
def megatron_args(monkeypatch):
    """Megatron's arguments for a run that can overlap, with changes."""
    from megatron.training.arguments import parse_args

    def make(*changes: object, **attributes: object):
        command = (
            "--num-experts 8 --expert-model-parallel-size 2 --micro-batch-size 4 --transformer-impl local "
            "--moe-token-dispatcher-type alltoall --hidden-dropout 0 --attention-dropout 0"
        )
        monkeypatch.setattr(sys, "argv", ["pretrain", *command.split(), *map(str, changes)])
        args = parse_args(ignore_unknown_args=True)
        args.gtp_weight_remat_size = 1
        args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or 1
        vars(args).update(attributes)
        return args

    return make


def test_auto_overlaps_with_two_chunks(megatron_args):
    plan, line = choose_plan(megatron_args(), LancetConfig())
    assert plan == Plan(num_chunks=2, dw_window=4)
    assert line == "chunks=2 dim=batch dw=fill dw-window=4"


def test_off_is_off(megatron_args):
    plan, line = choose_plan(megatron_args(), LancetConfig(plan=PlanChoice.OFF, num_chunks=4))
    assert plan is None
    assert "stock" in line


def test_a_bound_of_deferred_weight_gradients_is_part_of_the_plan(megatron_args):
    plan, line = choose_plan(megatron_args(), LancetConfig(dw_memory_mb=1.5))
    assert plan == Plan(num_chunks=2, dw_window=4, dw_memory_bytes=1_500_000)
    assert line.endswith("dw-memory=1.5MB")
    with pytest.raises(UsageError, match=r"--lancet-dw-memory-mb 1\.5 .*--lancet-dw-policy none defers none"):
        choose_plan(megatron_args(), LancetConfig(dw_policy=DwPolicy.NONE, dw_memory_mb=1.5))


@pytest.mark.parametrize("changes", [["--expert-model-parallel-size", 1], ["--num-experts", 0]])
def test_nothing_to_overlap_is_said(megatron_args, changes):
    plan, line = choose_plan(megatron_args(*changes), LancetConfig())
    assert plan is None
    assert "nothing to overlap" in line
    with pytest.raises(UsageError, match="there is none"):
        choose_plan(megatron_args(*changes), LancetConfig(num_chunks=2))


def test_more_chunks_than_samples(megatron_args):
    with pytest.raises(UsageError, match=r"--lancet-num-chunks 8 .*--micro-batch-size is 4\. Use at most 4"):
        choose_plan(megatron_args(), LancetConfig(num_chunks=8))


def test_a_micro_batch_of_one_is_not_cut(megatron_args):
    plan, _ = choose_plan(megatron_args("--micro-batch-size", 1), LancetConfig())
    assert plan is not None
    assert (plan.num_chunks, plan.dw_policy) == (1, DwPolicy.FILL)


def test_dropout_is_allowed_and_explained(megatron_args):
    _, line = choose_plan(megatron_args("--hidden-dropout", 0.1), LancetConfig())
    assert "dropout draws its random numbers chunk by chunk" in line


REFUSED = [
    (["--transformer-impl", "transformer_engine"], "--transformer-impl transformer_engine"),
    (["--moe-token-dispatcher-type", "allgather"], "pass --moe-token-dispatcher-type alltoall"),
    (["--tensor-model-parallel-size", 2], "--tensor-model-parallel-size 2"),
    (["--context-parallel-size", 2], "--context-parallel-size 2"),
    (["--expert-tensor-parallel-size", 2], "--expert-tensor-parallel-size 2"),
    (["--use-megatron-fsdp"], "use --use-distributed-optimizer"),
    (["--overlap-moe-expert-parallel-comm"], "another way to hide"),
    (["--delay-wgrad-compute"], "another way to hide"),
    (["--moe-shared-expert-overlap"], "another way to hide"),
    (["--moe-expert-capacity-factor", 1.5], "--moe-expert-capacity-factor"),
    (["--mtp-num-layers", 1], "--mtp-num-layers"),
    (["--recompute-granularity", "full"], "core_attn"),
    (["--recompute-granularity", "selective", "--recompute-modules", "core_attn", "moe"], "--recompute-modules moe"),
    (["--moe-router-load-balancing-type", "sinkhorn"], "--lancet-num-chunks 1"),
    (["--moe-input-jitter-eps", 0.1], "--lancet-num-chunks 1"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(change[0]) for change, _ in REFUSED])
def test_what_is_not_supported_is_refused(megatron_args, changes, message):
    with pytest.raises(UsageError, match=message) as refusal:
        choose_plan(megatron_args(*changes), LancetConfig())
    assert "--lancet-plan off" in str(refusal.value)
    assert choose_plan(megatron_args(*changes), LancetConfig(plan=PlanChoice.OFF))[0] is None


def test_whole_micro_batch_decisions_work_in_one_chunk(megatron_args):
    args = megatron_args("--moe-router-load-balancing-type", "sinkhorn")
    plan, _ = choose_plan(args, LancetConfig(num_chunks=1))
    assert plan is not None


def test_selective_recompute_of_core_attention_works(megatron_args):
    args = megatron_args("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
    assert choose_plan(args, LancetConfig())[0] is not None
