"""All verbs that the layers of a plan may have, and which of them run in chunks."""

from functools import cache

from megatron_lancet import registry
from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import Layer
from megatron_lancet.schedule.plan import OverlapRange
from megatron_lancet.schedule.turns import EXPERTS_LAYER, MTP_PROJECTION, VERBS, split_layer


def forms() -> list[Dispatch]:
    """Each dispatch that is known, and in one tile each that can have tiles: together they have all verbs."""
    known = list(Dispatch.known().values())
    return [*known, *(one.in_tiles(1) for one in known if one.can_tile and registry.has_tiles())]


def all_layers() -> list[Layer]:
    """Layers that together have every verb there is."""
    return [*VERBS.values(), (MTP_PROJECTION,), *(form.order(EXPERTS_LAYER) for form in forms())]


@cache
def is_cut(kind: LayerKind, op: str, overlap_range: OverlapRange) -> bool:
    """Whether an op of a layer runs in chunks, where the micro-batch is cut.

    Args:
        op: kind of the op.
    """
    layers = [form.order(VERBS[kind]) for form in forms()]
    return any(verb.kind == op for layer in layers for verb in split_layer(layer, overlap_range)[1])
