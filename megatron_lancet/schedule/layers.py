"""Kinds of layers, by the parts that they have."""

from collections.abc import Sequence
from enum import StrEnum


class LayerKind(StrEnum):
    """Kind of a layer. A GPT's layers have two parts each, layers of a hybrid model only one."""

    MOE = "moe"
    """Attention and routed experts."""
    DENSE = "dense"
    """Attention and an MLP."""
    ATTENTION_ONLY = "attention-only"
    """Attention, ``*`` or ``+`` in Megatron's ``--hybrid-layer-pattern``."""
    MOE_ONLY = "moe-only"
    """Routed experts, ``E`` in the pattern."""
    MLP_ONLY = "mlp-only"
    """An MLP, ``-`` in the pattern."""
    MTP = "mtp"
    """Op and weight that precede the layer of a multi-token prediction; the layer is one of the others."""
    NONE = "none"
    """Ops and weights outside the layers: embedding, head."""

    @property
    def has_experts(self) -> bool:
        """Whether the layer has routed experts, and with them all-to-alls."""
        return self in (LayerKind.MOE, LayerKind.MOE_ONLY)

    @property
    def has_attention(self) -> bool:
        """Whether the layer has attention."""
        return self in (LayerKind.MOE, LayerKind.DENSE, LayerKind.ATTENTION_ONLY)

    @property
    def has_mlp(self) -> bool:
        """Whether the layer has an MLP that is not an expert."""
        return self in (LayerKind.DENSE, LayerKind.MLP_ONLY)

    @property
    def has_one_part(self) -> bool:
        """Whether it is a layer of a hybrid model."""
        return self in (LayerKind.ATTENTION_ONLY, LayerKind.MOE_ONLY, LayerKind.MLP_ONLY)


_KINDS = {
    "*": LayerKind.ATTENTION_ONLY,
    "+": LayerKind.ATTENTION_ONLY,
    "E": LayerKind.MOE_ONLY,
    "-": LayerKind.MLP_ONLY,
}
_SYMBOLS = {LayerKind.ATTENTION_ONLY: "*", LayerKind.MOE_ONLY: "E", LayerKind.MLP_ONLY: "-"}


def pattern_of(kinds: Sequence[LayerKind]) -> str | None:
    """The parts of a hybrid model's layers as in Megatron's ``--hybrid-layer-pattern``, such as ``*E*-``; None for GPT.

    Every kind of attention is written as ``*``, and pipeline stages are not.
    """
    if not all(kind.has_one_part for kind in kinds):
        return None
    return "".join(_SYMBOLS[kind] for kind in kinds)


def kinds_of_pattern(symbols: str) -> list[LayerKind]:
    """The kinds of a hybrid model's layers.

    Args:
        symbols: one for each layer, as in Megatron's ``--hybrid-layer-pattern``, without separators.

    Raises:
        ValueError: a symbol stands for a kind of layer that is not known.
    """
    unknown = sorted(set(symbols) - set(_KINDS))
    if unknown:
        raise ValueError(f"the layers {', '.join(unknown)} are not known")
    return [_KINDS[symbol] for symbol in symbols]
