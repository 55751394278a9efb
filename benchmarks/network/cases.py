"""The variants of the network benchmark, and the cases in which they meet. Neither torch nor Megatron."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.cases import Case, Shape, Variant, check_saves_rows, select
from benchmarks.te_layers import check_unpacked
from megatron_lancet.errors import UsageError
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, LocalTokens, OverlapRange, fixed_plan, paired

MEGATRON = "megatron-overlap"
MEGATRON_DELAYED = f"{MEGATRON}-delay-wgrad"
"""Megatron's own overlap, emulated: on a CPU, threads replace its streams."""


def _plain_variants() -> list[Variant]:
    """Megatron's own attention, batch chunks."""
    none, batch = DwPolicy.NONE, ChunkDim.BATCH
    return [
        Variant("stock", None),
        Variant(MEGATRON, None, overlaps_micro_batches=True),
        Variant(MEGATRON_DELAYED, None, overlaps_micro_batches=True, delays_wgrad=True),
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


def _paired_variants() -> list[Variant]:
    """The backward of a micro-batch with the forward of the next."""
    return [
        Variant("paired-k1", paired(fixed_plan(1))),
        Variant("paired-k1-none", paired(fixed_plan(1, DwPolicy.NONE))),
        Variant("paired-k2", paired(fixed_plan(2))),
        Variant("paired-mix", paired(fixed_plan(1), fixed_plan(2))),
        Variant("paired-mix-k4", paired(fixed_plan(1), fixed_plan(4))),
    ]


def _deduplicated_variants() -> list[Variant]:
    """A token travels once to a rank."""
    whole, chunks = (fixed_plan(num_chunks, dispatch=DEDUP) for num_chunks in (1, 2))
    return [
        Variant("dedup-k1", whole),
        Variant("dedup-k2", chunks),
        Variant("paired-dedup-k1", paired(whole)),
    ]


def _two_hop_variants() -> list[Variant]:
    """A token travels once to a node."""
    return [Variant(f"two-hop-k{chunks}", fixed_plan(chunks, dispatch=TWO_HOP)) for chunks in (1, 2)]


def _tiled_variants() -> list[Variant]:
    """Rows of unchunked micro-batches go to the other rank in tiles; experts work on the others meanwhile."""
    return [
        *(
            Variant(f"tiles-{tiles}-{local_tokens}", fixed_plan(1, tiles=tiles, local_tokens=local_tokens))
            for tiles in (1, 2)
            for local_tokens in (LocalTokens.HALF, LocalTokens.AFTER)
        ),
        Variant("tiles-1-half-none", fixed_plan(1, DwPolicy.NONE, tiles=1)),
        Variant("tiles-1-half-k2", fixed_plan(2, tiles=1)),
    ]


def _placed_variants() -> list[Variant]:
    """Experts on the ranks that their load asks for."""
    return [Variant(f"placed-k{chunks}", fixed_plan(chunks), is_placed=True) for chunks in (1, 2)]


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


VARIANTS = {
    variant.name: variant
    for variant in [
        *_plain_variants(),
        *_sdpa_variants(),
        *_paired_variants(),
        *_deduplicated_variants(),
        *_two_hop_variants(),
        *_placed_variants(),
        *_tiled_variants(),
    ]
}
CHUNKED = "all-k2"
"""The variant with chunks alone that those with pairing or with two hops are compared with."""

_QUICK = ("stock", "experts-only-k2", "all-k2", "all-k4", "stock-free", "all-free-k2", "all-free-k4")
_EVERYTHING = tuple(
    name
    for name, variant in VARIANTS.items()
    if not (
        name.startswith("sequence-free")
        or variant.pairs_micro_batches
        or variant.is_deduplicated
        or variant.is_placed
        or variant.is_tiled
    )
)
_SCHEDULES = (
    *("stock", "experts-only-k2", "forward-only-k2", "dw-only", "all-k2", "all-k4"),
    *("stock-free", "stock-sdpa", "sequence-k2", "sequence-k4", "stock-sdpa-free"),
)
"""What depends on the link's rate, without the finer distinctions."""
_SEQUENCE = ("stock-sdpa", "sequence-k2", "sequence-k4", "stock-sdpa-free", "sequence-free-k2", "sequence-free-k4")
_ACCUMULATED = ("stock", MEGATRON, "all-k2", "all-k4", "stock-free")
ACCUMULATED = "45-accumulated"
_PAIRED = (
    *("stock", MEGATRON, CHUNKED, "stock-free"),
    *("paired-k1", "paired-k1-none", "paired-k2", "paired-mix", "paired-mix-k4"),
)
_FEW_PAIRED = ("stock", MEGATRON, CHUNKED, "stock-free", "paired-k1", "paired-mix")
_PAIRED_TE = ("stock", MEGATRON, MEGATRON_DELAYED, CHUNKED, "stock-free", "paired-k1")
TE_CASE = "45-te-m4"
_SMALLER = Shape(layers=3, hidden=384, seq_length=256, micro_batches=4)
"""Half the tokens and less than half the weights: a step of four micro-batches takes 4 to 6 s at 45 %."""
_UNPAIRED_TOP_4 = ("stock", "dw-only", CHUNKED, "all-k4", "stock-free", "dedup-k1", "dedup-k2")
_PAIRED_TOP_4 = ("stock", CHUNKED, "stock-free", "paired-k1", "dedup-k2", "paired-dedup-k1")
_TOP_4 = Shape(layers=3, seq_length=96, experts=8, topk=4)
"""Few tokens, since each has four rows; rows so wide that what travels next to their hidden values is below 1 %."""
_TOP_4_STEPS = replace(_TOP_4, seq_length=64, micro_batches=4)
_NODES = ("stock", CHUNKED, "stock-free", "dedup-k2", "two-hop-k1", "two-hop-k2")
_NODES_TOP_4 = Shape(layers=2, hidden=256, seq_length=128, experts=8, topk=4)
"""Two ranks share a core, so the model is small."""
_NODES_TOP_8 = replace(_NODES_TOP_4, seq_length=64, experts=16, topk=8)


_TILED = (
    *("stock", "experts-only-k2", "dw-only", CHUNKED, "all-k4", "stock-free"),
    *(variant.name for variant in _tiled_variants()),
)
_WIRED = ("stock", "dw-only", "mirrored-k2", CHUNKED, "stock-free")
_PLACED = ("stock", "dw-only", CHUNKED, "stock-free", "placed-k1", "placed-k2")
_ZIPF = Shape(layers=3, seq_length=256, experts=16, topk=2, zipf=1.0)


def _paired_cases() -> list[Case]:
    title = "{} micro-batches in a step, balanced top-1, stock exposes {} %"
    return [
        Case("45-m4", title.format("four", 45), 0.45, _PAIRED, _SMALLER),
        Case("20-m4", title.format("four", 20), 0.20, _PAIRED, _SMALLER),
        Case("65-m4", title.format("four", 65), 0.65, _PAIRED, _SMALLER),
        Case("45-m8", title.format("eight", 45), 0.45, _FEW_PAIRED, replace(_SMALLER, micro_batches=8)),
        Case(
            TE_CASE,
            f"layers of Transformer Engine with stand-in kernels, {title.format('four', 45)}",
            0.45,
            _PAIRED_TE,
            replace(_SMALLER, te=True),
        ),
    ]


def _top_4_cases() -> list[Case]:
    title = "{}balanced top-4 of 8 experts, stock exposes {} %"
    several = "four micro-batches in a step, "
    return [
        Case("45-top4", title.format("", 45), 0.45, _UNPAIRED_TOP_4, _TOP_4),
        Case("65-top4", title.format("", 65), 0.65, _UNPAIRED_TOP_4, _TOP_4),
        Case("65-top4-m4", title.format(several, 65), 0.65, _PAIRED_TOP_4, _TOP_4_STEPS),
    ]


def _nodes_cases() -> list[Case]:
    title = "two nodes of two ranks, balanced top-{} of {} experts, stock exposes 65 %"
    return [
        Case(f"nodes-top{shape.topk}", title.format(shape.topk, shape.experts), 0.65, _NODES, shape, ranks_per_node=2)
        for shape in (_NODES_TOP_4, _NODES_TOP_8)
    ]


def _load_cases() -> list[Case]:
    title = "top-2 of 16 experts by Zipf's law, stock exposes 45 %"
    return [Case("zipf", title, 0.45, _PLACED, _ZIPF)]


def _tiled_cases() -> list[Case]:
    """The cases 45 and 20 with other variants."""
    title = "balanced top-1, rows in tiles, stock exposes {} %"
    return [Case(f"{share}-tiles", title.format(share), share / 100, _TILED) for share in (45, 20)]


def _wired_cases() -> list[Case]:
    """Routed sums are added one layer later, in all variants; stock's modules wait for each message."""
    title = "MoE and dense layers in turn, routed sums one layer later, balanced top-1, stock exposes 45 %"
    return [Case("45-wired", title, 0.45, _WIRED, Shape(is_wired=True))]


def _cases() -> list[Case]:
    return [
        Case("45", "balanced top-1, stock exposes 45 %", 0.45, _EVERYTHING),
        Case(
            ACCUMULATED,
            "two micro-batches in a step, balanced top-1, stock exposes 45 %",
            0.45,
            _ACCUMULATED,
            Shape(micro_batches=2),
        ),
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


PAIRED_CASES = tuple(case.name for case in _paired_cases())
DISPATCH_CASES = tuple(case.name for case in _top_4_cases())
NODES_CASES = tuple(case.name for case in _nodes_cases())
LOAD_CASES = tuple(case.name for case in _load_cases())
TILED_CASES = tuple(case.name for case in _tiled_cases())
WIRED_CASES = tuple(case.name for case in _wired_cases())
CASES = {
    case.name: case
    for cases in (_cases, _paired_cases, _top_4_cases, _nodes_cases, _load_cases, _tiled_cases, _wired_cases)
    for case in cases()
}
_SAVES_ROWS = {DEDUP: DISPATCH_CASES[0], TWO_HOP: NODES_CASES[0]}


@dataclass(frozen=True)
class Preset:
    """What is run.

    Attributes:
        cases: names; empty for all.
        repeats: steps of each variant in a sweep.
        sweeps: of each case.
        minutes: that it takes on two cores of 2.5 GHz.
        few_variants: finer distinctions are left out.
    """

    cases: tuple[str, ...]
    repeats: int
    sweeps: int
    minutes: int
    few_variants: bool = False

    def __str__(self) -> str:
        few = "few variants, " if self.few_variants else ""
        sweeps = "one sweep" if self.sweeps == 1 else f"{self.sweeps} sweeps"
        return f"cases {' '.join(self.cases)}, {few}{sweeps}: about {self.minutes} minutes"


WHOLE = Preset((), 3, 3, 105)
PRESETS = {
    "quick": Preset(("45",), 5, 1, 2, few_variants=True),
    # The case quoted first in the documents, a case with Megatron's own overlap, and a full training step.
    "headline": Preset(("45", ACCUMULATED, "optimizer"), 3, 2, 16, few_variants=True),
    "pairing": Preset(PAIRED_CASES, 5, 1, 28),
    "dispatch": Preset(DISPATCH_CASES, 5, 1, 10),
    "nodes": Preset(NODES_CASES, 9, 1, 4),
    "load": Preset(LOAD_CASES, 9, 1, 4),
    "tiles": Preset(TILED_CASES, 5, 1, 8),
    "wired": Preset(WIRED_CASES, 7, 1, 3),
}
"""Parts of the benchmark, by the options that ask for them."""


def choose(cases: list[str], variants: list[str] | None, preset: Preset = WHOLE) -> list[Case]:
    """The cases to run, in the order of :data:`CASES`, each with the variants asked for and those they refer to.

    Args:
        cases: names; empty for the cases of ``preset``.
        variants: names; None for each case's own, or few of them, as ``preset`` says.

    Raises:
        UsageError: an unknown name.
    """

    def complete(wanted: set[str], case: Case) -> set[str]:
        if variants is None and preset.few_variants:
            wanted = wanted & {*_QUICK, *_ACCUMULATED} or wanted
        return set(with_references(wanted | {case.baseline}))

    return select(CASES, cases or preset.cases, list(VARIANTS), variants, complete)


def check(cases: Iterable[Case]) -> None:
    """
    Raises:
        UsageError: a variant overlaps micro-batches but a step has only one, a variant needs different layers than the
            case has, nothing can be deduplicated, a node has one rank, or Transformer Engine is not unpacked.
    """
    for case in cases:
        _check_layers(case)
        check_saves_rows(case, {name: VARIANTS[name].dispatch for name in case.variants}, _SAVES_ROWS)
        pairs = [name for name in case.variants if VARIANTS[name].pairs_micro_batches]
        if pairs and case.shape.micro_batches < 2:
            raise UsageError(
                f"variant {pairs[0]} overlaps two micro-batches, and a step of case {case.name} has "
                f"{case.shape.micro_batches}. Pass --cases {ACCUMULATED}, or --micro-batches 2 or more."
            )


def _check_layers(case: Case) -> None:
    if case.shape.te:
        check_unpacked(case.name)
        for name in case.variants:
            if VARIANTS[name].sdpa:
                raise UsageError(
                    f"variant {name} changes the attention of Megatron's local layers, but case {case.name} has "
                    "Transformer Engine layers. Leave out the variant, or pass another case."
                )
        return
    for name in case.variants:
        if VARIANTS[name].delays_wgrad:
            raise UsageError(
                f"variant {name} needs Transformer Engine layers, but case {case.name} has Megatron's local layers. "
                f"Pass --cases {TE_CASE}."
            )


def with_references(names: set[str]) -> tuple[str, ...]:
    """``names`` and all variants that they are compared with or bounded by, in the order of :data:`VARIANTS`."""
    needed = set(names)
    while True:
        more = {other for name in needed for other in (VARIANTS[name].reference, VARIANTS[name].compute)}
        if more <= needed:
            return tuple(name for name in VARIANTS if name in needed)
        needed |= more
