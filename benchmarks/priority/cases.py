"""What is measured: who reduces gradients when, and the links on which they meet. Neither torch nor Megatron."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.network.cases import Shape, Variant
from megatron_lancet.errors import UsageError
from megatron_lancet.schedule.plan import fixed_plan

BASELINE = "megatron"
"""By what it waits for, the link's rate is set; the others' gradients are compared with its own."""
OVERLAPPED = "megatron-overlap"
NO_PRIORITY = "ours-no-priority"
"""What the others' steps are compared with."""
FREE = "compute"
"""The baseline with its all-to-alls on the free link."""

_CHUNK_BYTES = 500_000
_WHOLE_BUCKETS = 1 << 40


def _variants(chunk_bytes: int) -> list[Variant]:
    plan = fixed_plan(2)
    return [
        Variant(BASELINE, None),
        Variant(OVERLAPPED, None, overlaps_reduction=True),
        Variant("ours-reduce-after", plan),
        Variant(NO_PRIORITY, plan, overlaps_reduction=True),
        Variant("ours-whole-buckets", plan, overlaps_reduction=True, grad_chunk_bytes=_WHOLE_BUCKETS),
        Variant("ours", plan, overlaps_reduction=True, grad_chunk_bytes=chunk_bytes),
        Variant(FREE, None, free_link=True),
    ]


VARIANTS = {variant.name: variant for variant in _variants(_CHUNK_BYTES)}


@dataclass(frozen=True)
class PriorityCase:
    """A model, a link, and the variants that take turns on them.

    Attributes:
        exposed_share: share of its forward and backward pass for which the baseline is to wait for all-to-alls: it
            sets the link's rate.
    """

    name: str
    title: str
    exposed_share: float
    shape: Shape
    variants: tuple[str, ...] = tuple(VARIANTS)


SHAPE = Shape(layers=6, hidden=256, seq_length=320)
CASES = {
    case.name: case
    for case in (
        PriorityCase("40", "Megatron's passes wait 40 % of their time for all-to-alls", 0.40, SHAPE),
        PriorityCase("60", "Megatron's passes wait 60 % of their time for all-to-alls", 0.60, SHAPE),
    )
}


def select(cases: list[str], variants: list[str] | None) -> list[PriorityCase]:
    """The cases to run, in the order of :data:`CASES`, each with the variants asked for and those they refer to.

    Args:
        cases: names; empty for all.
        variants: names; None for all.

    Raises:
        UsageError: an unknown name.
    """
    for what, names, known in (("case", cases, CASES), ("variant", variants or [], VARIANTS)):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise UsageError(f"there is no {what} {', '.join(unknown)}. Known: {', '.join(known)}.")
    wanted = set(VARIANTS if variants is None else variants) | {BASELINE, FREE}
    ordered = tuple(name for name in VARIANTS if name in wanted)
    return [replace(case, variants=ordered) for case in CASES.values() if not cases or case.name in cases]


@dataclass(frozen=True)
class PriorityJob:
    """What the runner asks of the ranks, as a file.

    Attributes:
        repeats: interleaved steps of each variant in a sweep.
        rate_bps: of the shaped link, in bits per second; None sets it by what the baseline exposes.
        cores: of the ranks.
        result: where rank 0 writes what was measured.
    """

    cases: list[PriorityCase]
    repeats: int
    sweeps: int
    rate_bps: float | None
    cores: list[int]
    result: Path

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps({**asdict(self), "result": str(self.result)}))


def read_job(path: Path) -> PriorityJob:
    """Read what :meth:`PriorityJob.write` wrote."""
    fields = json.loads(path.read_text())
    cases = [
        PriorityCase(**{**case, "shape": Shape(**case["shape"]), "variants": tuple(case["variants"])})
        for case in fields.pop("cases")
    ]
    return PriorityJob(**{**fields, "cases": cases, "result": Path(fields["result"])})
