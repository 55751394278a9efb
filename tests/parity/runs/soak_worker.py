"""pretrain_gpt_moe.py for many steps, with routing that is skewed at random, and with a plan that changes at random.

Usage: soak_worker.py WHOLE_STEPS RESULT ARGUMENTS... Without --lancet-plan off the plan changes between steps, up to
WHOLE_STEPS among plans of one chunk. Each rank writes RESULT.<rank>: exact losses, how often the plan changed, and
at every SAMPLED_STEPS-th step its memory and how many tensors are alive.
"""

import gc
import json
import os
import random
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_lancet.patching import around
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, Segment, fixed_plan
from megatron_lancet.training.pretrain import main

SEED = 7
SAMPLED_STEPS = 25
SWITCHES_PER_STEP = 0.2
SKEWS = (0.0, 1.0, 5.0, 50.0)
"""How far apart router logits are pushed: evenly spread, up to experts without any token."""


def random_plan(draw: random.Random, whole: bool) -> Plan:
    """A plan for a model of two layers, alike on all ranks."""

    def chunks() -> int:
        return 1 if whole else draw.randint(1, 4)

    dim = draw.choice(list(ChunkDim))
    span = draw.choice(list(OverlapRange))
    memory_bytes = draw.choice((None, 2_000))
    if draw.random() < 0.3:
        second = Segment(2, None, chunks(), draw.choice(list(ChunkDim)), draw.choice(list(OverlapRange)))
        return Plan((Segment(1, 1, chunks(), dim, span), second), dw_window=draw.randint(1, 8))
    plan = fixed_plan(chunks(), draw.choice(list(DwPolicy)), dim, span, memory_bytes)
    return replace(plan, dw_window=draw.randint(1, 8)) if plan.dw_policy is DwPolicy.FILL else plan


class Soak:
    """What happens before, in and after each step."""

    def __init__(self, num_whole_steps: int) -> None:
        self.losses: list[tuple[float, float]] = []
        self.rss_mb: list[float] = []
        self.num_tensors: list[int] = []
        self.num_switches = 0
        self._num_whole_steps = num_whole_steps
        self._plans = random.Random(SEED)
        self._skews = random.Random(SEED + 1)
        self._skew: torch.Tensor | None = None
        self._setup: Any = None

    def switchable(self, init, setup, *args, **kwargs):
        self._setup = setup
        init(setup, *args, **{**kwargs, "switchable": True})

    def skewed(self, gating, router, *args):
        return gating(router, *args) + self._skew

    def stepping(self, stock, *args, **kwargs):
        strength = self._skews.choice(SKEWS)
        self._skew = torch.tensor([strength * self._skews.gauss(0, 1) for _ in range(4)])
        if self._setup is not None and self._plans.random() < SWITCHES_PER_STEP:
            self._setup.switch(random_plan(self._plans, whole=len(self.losses) < self._num_whole_steps))
            self.num_switches += 1
        result = stock(*args, **kwargs)
        self.losses.append((result[0]["lm loss"].item(), float(result[5])))
        if len(self.losses) % SAMPLED_STEPS == 0:
            self.sample()
        return result

    def sample(self) -> None:
        gc.collect()
        self.rss_mb.append(psutil.Process().memory_info().rss / 1e6)
        self.num_tensors.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))

    def run(self) -> None:
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.training import training

        from megatron_lancet.training.overlap_setup import OverlapSetup

        with ExitStack() as stack:
            stack.enter_context(around(training, "train_step", self.stepping))
            stack.enter_context(around(OverlapSetup, "__init__", self.switchable))
            stack.enter_context(around(TopKRouter, "gating", self.skewed))
            main()


if __name__ == "__main__":
    num_whole_steps, path = int(sys.argv.pop(1)), sys.argv.pop(1)
    soak = Soak(num_whole_steps)
    soak.run()
    result = {
        "losses": soak.losses,
        "num_switches": soak.num_switches,
        "rss_mb": soak.rss_mb,
        "num_tensors": soak.num_tensors,
    }
    Path(f"{path}.{os.environ['RANK']}").write_text(json.dumps(result))
