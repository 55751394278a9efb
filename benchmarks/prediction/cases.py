"""What is predicted and measured: configurations of the overlap, and the cases in which they run. No torch.

In the case ``gradients`` gradients are summed over the ranks beside the backward pass, on the same link, and Adam runs.
"""

from dataclasses import replace

from benchmarks.harness.cases import Case, Shape, select
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, fixed_plan

BASELINE = "k1"
"""Stock's order: by what it waits for, the link's rate is set."""
PLANNED = "planned"
"""The configuration that the planner chooses for the case's profile."""


def _fixed_plans() -> dict[str, Plan]:
    none, fill = DwPolicy.NONE, DwPolicy.FILL
    batch, sequence = ChunkDim.BATCH, ChunkDim.SEQUENCE
    return {
        "k1": fixed_plan(1, none),
        "k1-dw": fixed_plan(1, fill),
        "experts-k2": fixed_plan(2, none, batch, OverlapRange.EXPERTS),
        "experts-k4-dw": fixed_plan(4, fill, batch, OverlapRange.EXPERTS),
        "gate-k2-dw": fixed_plan(2, fill, batch, OverlapRange.GATE),
        "gate-k4": fixed_plan(4, none, sequence, OverlapRange.GATE),
        "layer-k2-dw": fixed_plan(2, fill, batch, OverlapRange.LAYER),
        "layer-k4": fixed_plan(4, none, batch, OverlapRange.LAYER),
        "stack-k2": fixed_plan(2, none),
        "stack-k2-dw": fixed_plan(2, fill),
        "stack-k4-dw": fixed_plan(4, fill),
        "sequence-k2-dw": fixed_plan(2, fill, sequence),
        "sequence-k4": fixed_plan(4, none, sequence),
    }


FIXED_PLANS = _fixed_plans()
CONFIGURATIONS = (*FIXED_PLANS, PLANNED)


_SHAPE = Shape(hidden=384, seq_length=256)
_SOME = ("k1", "k1-dw", "experts-k4-dw", "layer-k2-dw", "stack-k2", "stack-k4-dw", "sequence-k2-dw", PLANNED)
_BATCH_ONLY = ("k1", "k1-dw", "layer-k2-dw", "stack-k2", "stack-k2-dw", "stack-k4-dw")


def _cases() -> list[Case]:
    skewed = replace(_SHAPE, hot_share=0.4)
    return [
        Case("45", "balanced routing, k1 exposes 45 %", 0.45, CONFIGURATIONS, _SHAPE, BASELINE),
        Case("20", "balanced routing, k1 exposes 20 %", 0.20, _SOME, _SHAPE, BASELINE),
        Case("65", "balanced routing, k1 exposes 65 %", 0.65, _SOME, _SHAPE, BASELINE),
        Case("skewed", "one expert of four gets 40 %, k1 exposes 45 %", 0.45, _SOME, skewed, BASELINE),
        Case(
            "gradients",
            "gradients reduced beside the backward pass, k1 exposes 45 %",
            0.45,
            _BATCH_ONLY,
            _SHAPE,
            BASELINE,
            optimizer=True,
        ),
    ]


CASES = {case.name: case for case in _cases()}


def choose(cases: list[str], configurations: list[str] | None) -> list[Case]:
    """The cases to run, in the order of :data:`CASES`.

    Args:
        cases: names; empty for all.
        configurations: names; None for each case's own.

    Raises:
        UsageError: an unknown name.
    """
    return select(CASES, cases, CONFIGURATIONS, configurations, noun="configuration")
