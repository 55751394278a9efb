"""Which runs may let all-to-alls go first."""

from types import SimpleNamespace

import pytest

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.patching import replaced
from megatron_lancet.schedule.micro_ops import CommPriority, MicroOps
from megatron_lancet.schedule.plan import fixed_plan
from megatron_lancet.training import grad_reduction, upstream
from megatron_lancet.training.comm_priority import choose_micro_ops

FIRST = LancetConfig(comm_priority=CommPriority.ALL_TO_ALL_FIRST, grad_chunk_mb=1.5)


def arguments(**changes: object) -> SimpleNamespace:
    standard = {
        "overlap_grad_reduce": True,
        "expert_model_parallel_size": 2,
        "ddp_reduce_scatter_with_fp32_accumulation": False,
        "num_distributed_optimizer_instances": 1,
    }
    return SimpleNamespace(**{**standard, **changes})


def test_chunks_are_of_the_size_asked_for():
    assert choose_micro_ops(arguments(), FIRST, fixed_plan(2)) == MicroOps(1_500_000)
    assert choose_micro_ops(arguments(overlap_grad_reduce=False), LancetConfig(), fixed_plan(2)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap_grad_reduce": False}, "pass --overlap-grad-reduce, or drop the flag"),
        ({"ddp_reduce_scatter_with_fp32_accumulation": True}, "--ddp-reduce-scatter-with-fp32-accumulation does not"),
        ({"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances 2 does not work with"),
    ],
)
def test_what_does_not_work_is_said(changes, message):
    with pytest.raises(UsageError, match=message):
        choose_micro_ops(arguments(**changes), FIRST, fixed_plan(2))


def test_stock_modules_have_nobody_to_ask():
    with pytest.raises(
        UsageError, match=r"needs the overlapping block.*--lancet-plan off or has no expert parallelism"
    ):
        choose_micro_ops(arguments(), FIRST, None)


def test_another_start_grad_sync_is_noticed():
    def start_grad_sync(self, force_all_reduce=False):
        raise NotImplementedError

    with (
        replaced(grad_reduction._BUCKET_GROUP, "start_grad_sync", start_grad_sync),
        pytest.raises(UsageError, match=r"start_grad_sync's '_coalescing_manager"),
    ):
        upstream.check_seams()
