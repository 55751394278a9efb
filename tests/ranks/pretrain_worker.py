"""pretrain_gpt_moe.py with its exact losses and its model's classes written down.

LANCET_TEST_RESULT names the file; the last rank writes it, which knows the losses also with pipeline stages;
of a mocked world, the one rank that there is. LANCET_TEST_CAPABILITY is the major number of the compute capability
that the tests' Transformer Engine sees. With LANCET_TEST_GRAPHS the CPU has CUDA graphs. With
LANCET_TEST_SHORT_RACE a race takes at most three turns, however noisy the machine is.
"""

import functools
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from megatron_lancet.patching import around, replaced
from tests import te_cpu


def recording(losses: list[dict[str, float]], classes: set[str]):
    def train_step(stock, *args, **kwargs):
        result = stock(*args, **kwargs)
        model = args[2]
        classes.update(type(module).__module__ for stage in model for module in stage.modules())
        loss_dict, grad_norm = result[0], result[5]
        losses.append({"grad norm": float(grad_norm), **{name: v.item() for name, v in loss_dict.items()}})
        return result

    return train_step


if __name__ == "__main__":
    from megatron.training import training

    # Only here: Megatron's checkpoint writer starts a process that imports this file, and needs nothing of it.
    from megatron_lancet.training.platform import detect
    from megatron_lancet.training.pretrain import main

    losses: list[dict[str, float]] = []
    classes: set[str] = set()
    with ExitStack() as stack:
        stack.enter_context(around(training, "train_step", recording(losses, classes)))
        if te_cpu.is_installed():
            capability = int(os.environ.get("LANCET_TEST_CAPABILITY", "9")), 0
            stack.enter_context(replaced(detect, "cpu_platform", functools.partial(te_cpu.te_platform, capability)))
        if "LANCET_TEST_GRAPHS" in os.environ:
            from tests.features.cuda_graphs.graphs_worker import platform_with_graphs

            stack.enter_context(around(detect, "platform", platform_with_graphs))
        if "LANCET_TEST_SHORT_RACE" in os.environ:
            from megatron_lancet.features.tuning import race

            for name in ("MAX_TURNS", "MAX_TIED_TURNS"):
                stack.enter_context(replaced(race, name, 3))
        main()
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if "LANCET_TEST_RESULT" in os.environ and (last or "mock" in sys.argv):
        result = {"losses": losses, "model_modules": sorted(classes)}
        Path(os.environ["LANCET_TEST_RESULT"]).write_text(json.dumps(result))
