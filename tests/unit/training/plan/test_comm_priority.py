"""Which runs may let all-to-alls go first."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import param_and_grad_buffer as ddp_buffers

from megatron_lancet.errors import UsageError
from megatron_lancet.features.comm_priority import grad_reduction
from megatron_lancet.features.comm_priority.comm_scheduler import CommScheduler
from megatron_lancet.features.comm_priority.feature import ActivePriority, CommPriorityFlags, choose_micro_ops
from megatron_lancet.features.tuning.reductions import reduction_of
from megatron_lancet.patching import replaced
from megatron_lancet.runtime.comm_stats import CommStats, CommTimes
from megatron_lancet.schedule.plan import fixed_plan
from megatron_lancet.schedule.reductions import CommPriority, GradientReduction, MicroOps
from megatron_lancet.training.megatron import seams
from tests.unit.training.configs import config_with

FIRST = config_with(CommPriorityFlags(CommPriority.ALL_TO_ALL_FIRST, grad_chunk_mb=1.5))


def arguments(**changes: object) -> SimpleNamespace:
    standard = {
        "overlap_grad_reduce": True,
        "expert_model_parallel_size": 2,
        "ddp_reduce_scatter_with_fp32_accumulation": False,
        "num_distributed_optimizer_instances": 1,
    }
    return SimpleNamespace(**{**standard, **changes})


def test_comm_priority_micro_ops_have_the_requested_size():
    assert choose_micro_ops(arguments(), FIRST, fixed_plan(2)) == MicroOps(1_500_000)
    assert choose_micro_ops(arguments(overlap_grad_reduce=False), config_with(), fixed_plan(2)) is None


def test_size_of_parts_without_the_priority_is_refused():
    off = config_with(CommPriorityFlags(grad_chunk_mb=2.5))
    with pytest.raises(UsageError, match=r"^--lancet-grad-chunk-mb 2.5 cuts .* is off: .* all-to-all-first too"):
        choose_micro_ops(arguments(), off, fixed_plan(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap_grad_reduce": False}, "pass --overlap-grad-reduce, or drop the flag"),
        ({"ddp_reduce_scatter_with_fp32_accumulation": True}, "--ddp-reduce-scatter-with-fp32-accumulation does not"),
        ({"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances 2 does not work with"),
    ],
)
def test_comm_priority_refuses_unsupported_settings(changes, message):
    with pytest.raises(UsageError, match=message):
        choose_micro_ops(arguments(**changes), FIRST, fixed_plan(2))


def test_comm_priority_needs_overlapping_modules():
    with pytest.raises(
        UsageError, match=r"needs the overlapping block.*--lancet-plan off or has no expert parallelism"
    ):
        choose_micro_ops(arguments(), FIRST, None)


def test_model_without_overlapped_reductions_is_stocks(monkeypatch):
    """A launcher may train a second model, such as a critic, beside the plan's."""
    managers = []
    bucket_group, stock = grad_reduction._BUCKET_GROUP, ddp_buffers._coalescing_manager
    monkeypatch.setattr(
        bucket_group, "start_grad_sync", lambda self: managers.append(ddp_buffers._coalescing_manager is stock)
    )
    two_ranks = SimpleNamespace(size=lambda: 2)
    with grad_reduction.reductions_in_micro_ops(CommScheduler(MicroOps(1), CommStats(torch.device("cpu")))):
        for overlaps in (False, True):
            config = SimpleNamespace(overlap_grad_reduce=overlaps, use_distributed_optimizer=False)
            bucket_group.start_grad_sync(SimpleNamespace(ddp_config=config, data_parallel_group=two_ranks))
    assert managers == [True, False]


def test_comm_priority_notices_another_start_grad_sync():
    def start_grad_sync(self, force_all_reduce=False):
        raise NotImplementedError

    with (
        replaced(grad_reduction._BUCKET_GROUP, "start_grad_sync", start_grad_sync),
        pytest.raises(UsageError, match=r"start_grad_sync's '_coalescing_manager"),
    ):
        seams.check_seams()


def test_planner_knows_how_gradients_are_reduced():
    layout = {
        "world_size": 16,
        "data_parallel_size": 4,
        "context_parallel_size": 2,  # these ranks sum gradients, too
        "pipeline_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "params_dtype": torch.bfloat16,
        "accumulate_allreduce_grads_in_fp32": False,
        "ddp_bucket_size": None,
        "ddp_num_buckets": None,
        "use_distributed_optimizer": True,
        "untie_embeddings_and_output_weights": True,
    }
    model = torch.nn.Linear(8, 10, bias=False)
    assert reduction_of(arguments(**layout), FIRST, [model]) == GradientReduction(
        dense_ranks=8,
        expert_ranks=4,
        priority=CommPriority.ALL_TO_ALL_FIRST,
        bucket_bytes=80_000_000,
        chunk_bytes=1_500_000,
        is_scatter=True,
    )
    in_fp32 = {**layout, "accumulate_allreduce_grads_in_fp32": True, "ddp_bucket_size": 1000}
    assert reduction_of(arguments(**in_fp32), config_with(), [model]).bucket_bytes == 4000
    in_three = {**layout, "ddp_num_buckets": 3}
    assert reduction_of(arguments(**in_three), FIRST, [model, model]).bucket_bytes == 160 // 3 * 2
    assert reduction_of(arguments(**{**layout, "data_parallel_size": 1, "context_parallel_size": 1}), FIRST, []) is None
    assert reduction_of(arguments(**layout, overlap_grad_reduce=False), config_with(), []) is None


def test_report_says_how_gradients_were_reduced_if_any_were():
    def lines(**figures):
        figures = {name: figures.get(name, 0) for name in vars(CommTimes())}
        return ActivePriority(MicroOps(100), CommStats(torch.device("cpu"))).lines(figures)

    found = {"num_grad_micro_ops": 9, "grad_bytes": 12_500_000, "grad_exposed_ms": 3.5}
    (line,) = lines(**found, num_grad_micro_ops_between=6)
    told = "12.5 MB reduced in 9 parts, 6 between all-to-alls and the others after the last; 3.5 ms waited for"
    assert line == f"gradients          {told}"
    *_, without_gaps = lines(**found)
    assert without_gaps.endswith("no gaps between all-to-alls for them: --lancet-comm-priority off is faster")
    assert lines() == ()
