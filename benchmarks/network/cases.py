"""What is measured: the variants of a training step, and the cases in which they meet. Neither torch nor Megatron."""

from dataclasses import dataclass, replace
from typing import Any

from megatron_lancet.errors import UsageError
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, fixed_plan


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and its micro-batch.

    Attributes:
        hot_share: share of the routed rows that go to the first expert; None: all experts get the same.
    """

    layers: int = 4
    hidden: int = 512
    heads: int = 4
    experts: int = 4
    topk: int = 1
    seq_length: int = 512
    micro_batch: int = 4
    vocab: int = 1024
    hot_share: float | None = None

    def expert_shares(self) -> list[float]:
        """Share of the routed rows that each expert is to get; sums to 1."""
        if self.hot_share is None:
            return [1 / self.experts] * self.experts
        return [self.hot_share] + [(1 - self.hot_share) / (self.experts - 1)] * (self.experts - 1)


@dataclass(frozen=True)
class Variant:
    """One way to run the step.

    Attributes:
        plan: None for stock modules.
        reference: the variant that it is compared with.
        compute: the variant on the free link whose CPU time bounds its step from below.
        sdpa: torch's fused attention.
        free_link: rows and counts travel on the link that is not shaped.
        blocks_in_backward: a backward all-to-all is waited for where it is issued.
        overlaps_reduction: Megatron's overlap-grad-reduce: gradient buckets are reduced beside the backward pass.
        grad_chunk_bytes: most bytes of a micro-op, where all-to-alls go first; None: whole buckets, when complete.
    """

    name: str
    plan: Plan | None
    reference: str = "stock"
    compute: str = "stock-free"
    sdpa: bool = False
    free_link: bool = False
    blocks_in_backward: bool = False
    overlaps_reduction: bool = False
    grad_chunk_bytes: int | None = None


def _plain_variants() -> list[Variant]:
    """Megatron's own attention, batch chunks."""
    none, batch = DwPolicy.NONE, ChunkDim.BATCH
    return [
        Variant("stock", None),
        Variant("experts-only-k2", fixed_plan(2, none, batch, OverlapRange.EXPERTS)),
        Variant("experts-only-k4", fixed_plan(4, none, batch, OverlapRange.EXPERTS)),
        Variant("forward-only-k2", fixed_plan(2, none), blocks_in_backward=True),
        Variant("dw-only", fixed_plan(1)),
        Variant("mirrored-k2", fixed_plan(2, none)),
        Variant("mirrored-k4", fixed_plan(4, none)),
        Variant("all-k2", fixed_plan(2)),
        Variant("all-k4", fixed_plan(4)),
        Variant("stock-free", None, free_link=True),
        Variant("all-free-k2", fixed_plan(2), reference="stock-free", free_link=True),
        Variant("all-free-k4", fixed_plan(4), reference="stock-free", free_link=True),
    ]


def _sdpa_variants() -> list[Variant]:
    """Fused attention, which sequence chunks need: it computes less than Megatron's, so it has a stock of its own."""
    own: dict[str, Any] = {"compute": "stock-sdpa-free", "sdpa": True}
    stock = Variant("stock-sdpa", None, reference="stock-sdpa", **own)
    variants = [stock, replace(stock, name="stock-sdpa-free", free_link=True)]
    for num_chunks in (2, 4):
        sequence = fixed_plan(num_chunks, chunk_dim=ChunkDim.SEQUENCE)
        variants += [
            Variant(f"all-sdpa-k{num_chunks}", fixed_plan(num_chunks), "stock-sdpa", **own),
            Variant(f"sequence-k{num_chunks}", sequence, "stock-sdpa", **own),
            Variant(f"sequence-free-k{num_chunks}", sequence, "stock-sdpa-free", free_link=True, **own),
        ]
    return variants


VARIANTS = {variant.name: variant for variant in _plain_variants() + _sdpa_variants()}

_QUICK = ("stock", "experts-only-k2", "all-k2", "all-k4", "stock-free", "all-free-k2", "all-free-k4")
_EVERYTHING = tuple(name for name in VARIANTS if not name.startswith("sequence-free"))
_SCHEDULES = (
    *("stock", "experts-only-k2", "forward-only-k2", "dw-only", "all-k2", "all-k4"),
    *("stock-free", "stock-sdpa", "sequence-k2", "sequence-k4", "stock-sdpa-free"),
)
"""What depends on the link's rate, without the finer distinctions."""
_SEQUENCE = ("stock-sdpa", "sequence-k2", "sequence-k4", "stock-sdpa-free", "sequence-free-k2", "sequence-free-k4")


@dataclass(frozen=True)
class Case:
    """A model, a link and the variants that take turns on them.

    Attributes:
        exposed_share: share of its forward and backward pass for which stock is to wait: it sets the link's rate.
        baseline: the stock variant by which the rate is set.
        optimizer: gradient reduction and optimizer step are in the timed region too.
    """

    name: str
    title: str
    exposed_share: float
    variants: tuple[str, ...]
    shape: Shape = Shape()
    baseline: str = "stock"
    optimizer: bool = False


def _cases() -> list[Case]:
    return [
        Case("45", "balanced top-1, stock exposes 45 %", 0.45, _EVERYTHING),
        Case("20", "balanced top-1, stock exposes 20 %", 0.20, _SCHEDULES),
        Case("65", "balanced top-1, stock exposes 65 %", 0.65, _SCHEDULES),
        Case("skewed", "skewed top-1 (one expert gets 40 %), stock exposes 45 %", 0.45, _QUICK, Shape(hot_share=0.4)),
        Case("small", "half the tokens, balanced top-1, stock exposes 45 %", 0.45, _QUICK, Shape(seq_length=256)),
        Case("top-2", "balanced top-2, stock exposes 45 %", 0.45, _QUICK, Shape(topk=2)),
        Case(
            "micro-batch-1",
            "one sample of 2048 tokens, sequence chunks, stock with fused attention exposes 45 %",
            0.45,
            _SEQUENCE,
            Shape(micro_batch=1, seq_length=2048),
            baseline="stock-sdpa",
        ),
        Case(
            "optimizer",
            "balanced top-1 with gradient reduction and Adam in the step, stock's passes expose 45 %",
            0.45,
            _QUICK,
            optimizer=True,
        ),
    ]


CASES = {case.name: case for case in _cases()}
QUICK_CASE = "45"


def select(cases: list[str], variants: list[str] | None, quick: bool) -> list[Case]:
    """The cases to run, in the order of :data:`CASES`, each with the variants asked for and those they refer to.

    Args:
        cases: names; empty for all, or the one of a quick run.
        variants: names; None for each case's own.

    Raises:
        UsageError: an unknown name.
    """
    names = cases or ([QUICK_CASE] if quick else list(CASES))
    _refuse_unknown("case", names, list(CASES))
    if variants is not None:
        _refuse_unknown("variant", variants, list(VARIANTS))
    selected = []
    for case in CASES.values():
        if case.name in names:
            own = set(_QUICK) & set(case.variants) or set(case.variants) if quick else set(case.variants)
            wanted = own if variants is None else set(variants)
            selected.append(replace(case, variants=with_references(wanted | {case.baseline})))
    return selected


def with_references(names: set[str]) -> tuple[str, ...]:
    """``names`` and all variants that they are compared with or bounded by, in the order of :data:`VARIANTS`."""
    needed = set(names)
    while True:
        more = {other for name in needed for other in (VARIANTS[name].reference, VARIANTS[name].compute)}
        if more <= needed:
            return tuple(name for name in VARIANTS if name in needed)
        needed |= more


def _refuse_unknown(what: str, names: list[str], known: list[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"there is no {what} {', '.join(unknown)}. Known: {', '.join(known)}.")
