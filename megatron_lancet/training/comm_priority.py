"""Whether a run's gradient reductions give way to its all-to-alls, and what stands against it."""

import argparse

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.schedule.micro_ops import CommPriority, MicroOps
from megatron_lancet.schedule.plan import Plan


def choose_micro_ops(args: argparse.Namespace, config: LancetConfig, plan: Plan | None) -> MicroOps | None:
    """How gradient reductions are cut; None where Megatron runs them.

    Args:
        args: Megatron's arguments, validated.
        plan: None for stock modules.

    Raises:
        UsageError: the run asks for the priority together with something that it does not support.
    """
    if config.comm_priority is CommPriority.OFF:
        return None
    flag = f"--lancet-comm-priority {config.comm_priority}"
    if plan is None:
        raise UsageError(
            f"{flag} needs the overlapping block, but this run has stock Megatron modules: it was given --lancet-plan "
            f"off or has no expert parallelism (--expert-model-parallel-size is {args.expert_model_parallel_size}). "
            "Drop one of the two."
        )
    if not args.overlap_grad_reduce:
        raise UsageError(
            f"{flag} orders gradient reductions in the backward pass, but they run after it: pass "
            "--overlap-grad-reduce, or drop the flag."
        )
    for other, given in {
        "--ddp-reduce-scatter-with-fp32-accumulation": args.ddp_reduce_scatter_with_fp32_accumulation,
        f"--num-distributed-optimizer-instances {args.num_distributed_optimizer_instances}": (
            args.num_distributed_optimizer_instances > 1
        ),
    }.items():
        if given:
            raise UsageError(f"{other} does not work with {flag}: it reduces in a way of its own. Drop one of the two.")
    return MicroOps(round(config.grad_chunk_mb * 1e6))
