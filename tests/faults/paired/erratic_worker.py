"""Paired steps on a wire whose messages seem done at random: each must end with the bits of an undisturbed step.

Usage: erratic_worker.py RESULT.json NUM_SEEDS. Each rank writes RESULT.json.<rank>.
"""

import random
import sys
import time
from contextlib import ExitStack

import torch.distributed as dist

from megatron_lancet.patching import around, replaced
from tests.faults.paired.step import PLANS, PairedStep
from tests.ranks.worker import finish, run_on_cpu

SLOW_S = 2e-3


def disturb(seed: int, stack: ExitStack) -> None:
    """Differently on each rank: what polls a message sees it done or not by chance, and some launches come late."""
    from megatron_lancet.runtime.comm import Comm
    from megatron_lancet.runtime.transport.works import WorksTransfer

    dice = random.Random(f"{seed} {dist.get_rank()}")
    probability = dice.random()
    stack.enter_context(replaced(WorksTransfer, "done", lambda _: dice.random() < probability))

    def late(launch, comm, *args):
        if dice.random() < 0.2:
            time.sleep(SLOW_S * dice.random())
        return launch(comm, *args)

    for name in ("launch", "launch_when_known", "launch_counts"):
        stack.enter_context(around(Comm, name, late))


def unequal_seeds(plan: str, num_seeds: int) -> list[int]:
    """Seeds with which a step's losses or gradients are not those of an undisturbed step."""
    with ExitStack() as stack:
        step = PairedStep(PLANS[plan], 60.0, stack)
        step.run()
        expected = step.run(traced=False), step.gradients()
        unequal = []
        for seed in range(num_seeds):
            with ExitStack() as disturbed:
                disturb(seed, disturbed)
                losses, gradients = step.run(traced=False), step.gradients()
            if losses != expected[0] or any(not gradients[name].equal(expected[1][name]) for name in gradients):
                unequal.append(seed)
    return unequal


def main() -> None:
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, create_gloo_process_groups=False)
    finish({plan: unequal_seeds(plan, int(sys.argv[2])) for plan in PLANS})


if __name__ == "__main__":
    run_on_cpu(main)
