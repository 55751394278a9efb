"""Variants that reduce gradients at different times, and the links on which they meet. Neither torch nor Megatron."""

from benchmarks.harness.cases import Case, Shape, Variant, select
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


SHAPE = Shape(layers=6, hidden=256, seq_length=320)


def _case(percent: int) -> Case:
    title = f"Megatron's passes wait {percent} % of their time for all-to-alls"
    return Case(str(percent), title, percent / 100, tuple(VARIANTS), SHAPE, BASELINE, optimizer=True)


CASES = {case.name: case for case in (_case(40), _case(60))}


def choose(cases: list[str], variants: list[str] | None) -> list[Case]:
    """The cases to run, in the order of :data:`CASES`, each with the variants asked for and those they refer to.

    Args:
        cases: names; empty for all.
        variants: names; None for all.

    Raises:
        UsageError: an unknown name.
    """
    return select(CASES, cases, list(VARIANTS), variants, lambda wanted, _: wanted | {BASELINE, FREE})
