"""The trainings that are compared, and what they are compared with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_lancet.errors import UsageError
from megatron_lancet.planning.search.planner import NUM_AT_ENDS

USERS, SAME = "off", "off-same"
"""Stock as a user has it; stock with the attention kernel and the transport of ours, which is the reference."""
AUTO, KEPT = "auto", "auto-kept"
"""From nothing; with the profile that the first has kept."""
MEGATRON, MEGATRON_DELAYED = "megatron-overlap", "megatron-overlap-delayed"


@dataclass(frozen=True)
class Variant:
    """A way to run the same training.

    Attributes:
        name: of the variant.
        flags: of Megatron-Lancet and Megatron.
        options: of the ranks, :mod:`benchmarks.demo.rank`.
        meaning: for the tables.
    """

    name: str
    flags: tuple[str, ...]
    meaning: str
    options: tuple[str, ...] = ()


_OFF = ("--lancet-plan", "off")
_SDPA = ("--lancet-attention", "sdpa")
"""torch's fused attention kernel for local layers; Transformer Engine's layers have their own."""


def _fixed(num_chunks: int, dim: str = "batch", dispatch: str = "plain", pairing: str = "off") -> tuple[str, ...]:
    chunks = ("--lancet-num-chunks", str(num_chunks), "--lancet-chunk-dim", dim)
    return (*chunks, "--lancet-dispatch", dispatch, "--lancet-pairing", pairing)


_GAPS = ("--lancet-comm-priority", "all-to-all-first", "--lancet-grad-chunk-mb", "0.53")
"""Parts of half a layer's dense gradients."""
_REDUCED_LAYER_BY_LAYER = ("--overlap-grad-reduce", "--ddp-bucket-size", "262144")
_DOCUMENTS = "--dataloader-inter-document-masking"
_SKEWED = ("--moe-aux-loss-coeff", "0")
_TP_SIZES = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 4"
_TP = ("--sequence-parallel", *_TP_SIZES.split())
_OVERLAP = (*_OFF, "--overlap-moe-expert-parallel-comm")
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(USERS, _OFF, "stock as a user has it", ("--own-messages",)),
        Variant(SAME, _OFF, "stock with our attention kernel and transport"),
        Variant(AUTO, (), "--lancet-plan auto, from nothing"),
        Variant(KEPT, (), "the same with a kept profile"),
        Variant("k1-dedup", _fixed(1, dispatch="dedup"), "one chunk, deduplicated dispatch"),
        Variant("k2", _fixed(2), "two batch chunks"),
        Variant("k2-seq", _fixed(2, "sequence"), "two sequence chunks"),
        Variant("k2-seq-dedup", _fixed(2, "sequence", "dedup"), "two sequence chunks, dedup"),
        Variant("pairs", _fixed(1, pairing="on"), "pairs of one chunk"),
        Variant("k1", _fixed(1), "one chunk"),
        Variant("k1-gaps", (*_fixed(1), *_GAPS), "one chunk, reductions in gaps"),
        Variant("pairs-gaps", (*_fixed(1, pairing="on"), *_GAPS), "pairs of one chunk, reductions in gaps"),
        Variant("pairs-dedup", _fixed(1, dispatch="dedup", pairing="on"), "pairs of one chunk, dedup"),
        Variant("pairs-k2-seq", _fixed(2, "sequence", "plain", "on"), "pairs of two sequence chunks"),
        Variant("pairs-k2-seq-dedup", _fixed(2, "sequence", "dedup", "on"), "pairs of two sequence chunks, dedup"),
        Variant(
            "pairs-ends-k2-seq-dedup",
            ("--lancet-plan", "benchmarks/auto/plans/pairs-ends-k2-seq-dedup.json"),
            "pairs of one chunk, two sequence chunks at the ends of a step, dedup",
        ),
        Variant(MEGATRON, _OVERLAP, "Megatron's own overlap", ("--threads",)),
        Variant(MEGATRON_DELAYED, (*_OVERLAP, "--delay-wgrad-compute"), "with its delayed dW", ("--threads",)),
    )
}
FIXED = tuple(name for name in VARIANTS if name not in (USERS, SAME, AUTO, KEPT, MEGATRON, MEGATRON_DELAYED))


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        name: of the case.
        share: part of its step for which stock is to wait for all-to-alls; it sets the link's rate.
        micro_batches: of a step on each rank.
        topk: experts of a token, of ``experts``.
        experts: of a layer.
        te: Transformer Engine's layers in bf16, in place of local ones in fp32.
        kept: whether ``auto`` also runs with a kept profile.
        flags: further flags of Megatron.
        only: variants that run beside the reference and ``auto``; all that the case has, if empty.
        ranks_per_node: ranks on each side of the link, a tensor parallel group.
    """

    name: str
    share: float
    micro_batches: int
    topk: int = 2
    experts: int = 4
    te: bool = False
    kept: bool = False
    flags: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    ranks_per_node: int = 1

    @property
    def described(self) -> str:
        """The training in a few words."""
        batches = f"{self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}"
        layers = "Transformer Engine's layers in bf16" if self.te else "local layers in fp32"
        further = [
            text
            for text, is_so in (
                ("gradients reduced in the backward pass", self.reduces_in_backward),
                ("packed documents", _DOCUMENTS in self.flags),
                ("no balancing loss", self.flags == _SKEWED),
                ("tensor and sequence parallel on four ranks", self.ranks_per_node > 1),
            )
            if is_so
        ]
        return ", ".join((batches, f"top-{self.topk} of {self.experts}", layers, *further))

    @property
    def reduces_in_backward(self) -> bool:
        """Whether reductions and all-to-alls of the last backward share the link."""
        return "--overlap-grad-reduce" in self.flags

    @property
    def variants(self) -> list[Variant]:
        """What runs in this case; the reference first."""
        names = [SAME, USERS, AUTO, *([KEPT] if self.kept else []), "k2-seq"]
        if self.micro_batches == 1:
            names += ["k2", "k1", "k1-gaps"] if self.reduces_in_backward else ["k2"]
            names += ["k1-dedup", "k2-seq-dedup"] if self.topk > 1 else []
        else:
            names += ["pairs", "pairs-gaps"] if self.reduces_in_backward else ["pairs"]
            names += ["k2-seq-dedup", "pairs-dedup", "pairs-k2-seq-dedup"] if self.topk > 1 else ["k2", "pairs-k2-seq"]
            if self.topk > 1 and self.micro_batches > NUM_AT_ENDS:
                names.append("pairs-ends-k2-seq-dedup")
            # Megatron refuses its overlap in fp32.
            names += [MEGATRON, MEGATRON_DELAYED] if self.te else []
        if self.ranks_per_node > 1:  # sequence parallelism shares out what sequence chunks would cut
            names = [*(name for name in names if "-seq" not in name), "k2"]
        return [VARIANTS[name] for name in names if not self.only or name in (SAME, AUTO, *self.only)]

    def with_variants(self, names: Sequence[str]) -> "Case":
        """The case with some of its variants beside the reference and ``auto``; with all of them, if none is named.

        Raises:
            UsageError: the case has no such variant, or no fixed plan is among them.
        """
        have = [variant.name for variant in self.variants if variant.name not in (SAME, AUTO)]
        unknown = [name for name in names if name not in have]
        if unknown:
            raise UsageError(f"{self.name} has no {', '.join(unknown)}. Expected: {', '.join(have)}.")
        if names and not set(names) & set(FIXED):
            raise UsageError(f"{self.name}: expected a fixed plan among the variants, found {', '.join(names)}.")
        return replace(self, only=tuple(names))

    def flags_of(self, variant: Variant) -> list[str]:
        """Flags by which a variant runs this case."""
        same_kernel = _SDPA if variant.name not in (USERS, AUTO, KEPT) and not self.te else ()
        return [*self.flags, *variant.flags, *same_kernel]


_NEARLY_HALF = 0.475
"""The middle of 45 to 50 %: in measured turns stock's share differs from this by a few percent of a step."""
_ALONE = (USERS, "k1", "k1-gaps", "k1-dedup", "k2-seq", "k2-seq-dedup")
CASES = {
    case.name: case
    for case in (
        Case("45-m4", _NEARLY_HALF, 4),
        Case("45-m1", _NEARLY_HALF, 1, kept=True),
        Case("45-m8", _NEARLY_HALF, 8),
        Case("20-m4", 0.20, 4),
        Case("10-m1", 0.10, 1),
        Case("65-m4", 0.65, 4),
        Case("45-m4-top1", _NEARLY_HALF, 4, topk=1, flags=("--moe-router-pre-softmax",)),  # Megatron requires it
        Case("45-m4-top4of8", _NEARLY_HALF, 4, topk=4, experts=8),
        Case("45-m4-skewed", _NEARLY_HALF, 4, flags=_SKEWED),
        Case("45-m4-te", _NEARLY_HALF, 4, te=True, kept=True),
        Case("45-m2-te", _NEARLY_HALF, 2, te=True),
        Case("45-m8-te", _NEARLY_HALF, 8, te=True),
        Case("20-m4-te", 0.20, 4, te=True),
        Case("45-m4-documents", _NEARLY_HALF, 4, flags=(_DOCUMENTS,)),
        Case("45-m4-tp2", _NEARLY_HALF, 4, experts=8, flags=_TP, ranks_per_node=2),
        Case("65-m1-reductions", 0.65, 1, flags=_REDUCED_LAYER_BY_LAYER, only=_ALONE),
        Case(
            "45-m2-reductions",
            _NEARLY_HALF,
            2,
            flags=_REDUCED_LAYER_BY_LAYER,
            only=(USERS, "pairs", "pairs-gaps", "pairs-dedup", "k2-seq-dedup", "pairs-k2-seq-dedup"),
        ),
    )
}


def chosen(names: Sequence[str]) -> list[Case]:
    """Cases by name; all without names.

    Raises:
        UsageError: one is unknown.
    """
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise UsageError(f"unknown case {', '.join(unknown)}. Expected: {', '.join(CASES)}.")
    return [CASES[name] for name in names or CASES]
