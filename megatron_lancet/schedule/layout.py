"""A model on its ranks, as far as a dispatch depends on it, and why it can't have one."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_lancet import registry
from megatron_lancet.schedule.dispatch import NO_TILES, PLAIN
from megatron_lancet.schedule.nodes import Nodes

NOTHING_IS_SENT = "there is one expert-parallel rank, so nothing is sent"


@dataclass(frozen=True)
class Layout:
    """A model on its ranks, as far as a dispatch depends on it.

    Attributes:
        ep_size: number of ranks that share the experts.
        num_experts: experts of a MoE layer, on all ranks; 0 for a model without experts.
        topk: experts of a token.
        pads_to_capacity: whether routers give every expert equally many rows of a micro-batch.
        nodes: how expert-parallel groups lie on nodes, or why they do not lie on several, see
            :func:`~megatron_lancet.planning.dispatch.nodes_of_group`; None where it is unknown.
        is_quantized: whether Transformer Engine's modules compute in fp8 or fp4.
    """

    ep_size: int
    num_experts: int
    topk: int
    pads_to_capacity: bool = False
    nodes: Nodes | str | None = None
    is_quantized: bool = False


class Blocker(NamedTuple):
    """Why a layout can't have a dispatch.

    Attributes:
        reason: a clause.
        is_evident: whether the reason is plain from the layout, so only ``lancet plan explain`` prints it.
        advice: what to do about it, as an imperative; empty where the user can only choose another dispatch.
    """

    reason: str
    is_evident: bool = False
    advice: str = ""


def tiles_blocker(layout: Layout) -> Blocker | None:
    """Why the rows of a layout can't go to other ranks in tiles; None if they can."""
    if not registry.has_tiles():
        return Blocker(NO_TILES, is_evident=True, advice="install the whole package")
    return PLAIN.in_tiles(1).blocker(layout)
