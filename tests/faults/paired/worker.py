"""A rank of a training of paired steps, in the second of which one rank meets a fault.

Usage: worker.py PLAN KIND RANK PLACE LABELS. PLAN is a key of step.PLANS, PLACE the label of a boundary
(see boundaries.py), at which rank RANK meets the fault of this KIND; nobody does if it is empty. Rank 0 writes the
labels of the second step's boundaries into the file LABELS if it gets there.
"""

import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.faults.paired.step import PLANS, PairedStep

SILENCE_S = 4.0
"""After which an all-to-all gives up."""
REDUCTION_SILENCE_S = 8.0
"""The same for gradient reductions, whose group is also used while all ranks start."""


def main(status) -> None:
    from megatron.core import parallel_state

    from megatron_lancet.training.platform.cpu import cpu_platform

    plan, kind, faulty_rank, place, labels = sys.argv[1:]
    with ExitStack() as stack:
        stack.enter_context(cpu_platform())
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=2,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=REDUCTION_SILENCE_S / 60,
        )
        step = PairedStep(PLANS[plan], SILENCE_S, stack)
        status.describe = lambda: f"in a step, {step.setup.position}"
        step.run()
        step.boundaries.begin_step(kind if dist.get_rank() == int(faulty_rank) else "", place)
        step.run()
        if dist.get_rank() == 0:
            Path(labels).write_text("\n".join(step.boundaries.passed))
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    from megatron_lancet.training.process.exit import run_rank

    run_rank(main)
