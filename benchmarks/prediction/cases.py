"""What is predicted and measured: configurations of the overlap, and the cases in which they run. No torch."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.network.cases import Shape
from megatron_lancet.errors import UsageError
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, fixed_plan

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


@dataclass(frozen=True)
class PredictionCase:
    """A model, a link, and the configurations that take turns on them.

    Attributes:
        exposed_share: of the passes, for which ``k1`` (stock's order) is to wait: it sets the link's rate.
        configurations: names, of :data:`CONFIGURATIONS`.
        reduces: gradients are summed over the ranks beside the backward pass, on the same link, and Adam runs.
    """

    name: str
    title: str
    exposed_share: float
    configurations: tuple[str, ...]
    shape: Shape
    reduces: bool = False


_SHAPE = Shape(hidden=384, seq_length=256)
_SOME = ("k1", "k1-dw", "experts-k4-dw", "layer-k2-dw", "stack-k2", "stack-k4-dw", "sequence-k2-dw", PLANNED)
_BATCH_ONLY = ("k1", "k1-dw", "layer-k2-dw", "stack-k2", "stack-k2-dw", "stack-k4-dw")


def _cases() -> list[PredictionCase]:
    skewed = replace(_SHAPE, hot_share=0.4)
    return [
        PredictionCase("45", "balanced routing, k1 exposes 45 %", 0.45, CONFIGURATIONS, _SHAPE),
        PredictionCase("20", "balanced routing, k1 exposes 20 %", 0.20, _SOME, _SHAPE),
        PredictionCase("65", "balanced routing, k1 exposes 65 %", 0.65, _SOME, _SHAPE),
        PredictionCase("skewed", "one expert of four gets 40 %, k1 exposes 45 %", 0.45, _SOME, skewed),
        PredictionCase(
            "gradients", "gradients reduced beside the backward pass, k1 exposes 45 %", 0.45, _BATCH_ONLY, _SHAPE, True
        ),
    ]


CASES = {case.name: case for case in _cases()}


def select(cases: list[str], configurations: list[str] | None) -> list[PredictionCase]:
    """The cases to run, in the order of :data:`CASES`.

    Args:
        cases: names; empty for all.
        configurations: names; None for each case's own.

    Raises:
        UsageError: an unknown name.
    """
    for what, names, known in (("case", cases, CASES), ("configuration", configurations or [], CONFIGURATIONS)):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise UsageError(f"there is no {what} {', '.join(unknown)}. Known: {', '.join(known)}.")
    selected = [case for case in CASES.values() if not cases or case.name in cases]
    if configurations is None:
        return selected
    ordered = tuple(name for name in CONFIGURATIONS if name in configurations)
    return [replace(case, configurations=ordered) for case in selected]


@dataclass(frozen=True)
class PredictionJob:
    """What the runner asks of the ranks, as a file.

    Attributes:
        repeats: interleaved steps of each configuration.
        rate_bps: of the shaped link, in bits per second; None sets it by what ``k1`` exposes.
        timelines: folder that gets measured and predicted timelines of each configuration; None for none.
        cores: of the ranks.
        result: where rank 0 writes what was measured.
    """

    cases: list[PredictionCase]
    repeats: int
    rate_bps: float | None
    timelines: Path | None
    cores: list[int]
    result: Path

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        timelines = None if self.timelines is None else str(self.timelines)
        path.write_text(json.dumps({**asdict(self), "result": str(self.result), "timelines": timelines}))


def read_job(path: Path) -> PredictionJob:
    """Read what :meth:`PredictionJob.write` wrote."""
    fields = json.loads(path.read_text())
    cases = [
        PredictionCase(**{**case, "shape": Shape(**case["shape"]), "configurations": tuple(case["configurations"])})
        for case in fields.pop("cases")
    ]
    timelines = fields.pop("timelines")
    return PredictionJob(
        **{
            **fields,
            "cases": cases,
            "result": Path(fields["result"]),
            "timelines": None if timelines is None else Path(timelines),
        }
    )
