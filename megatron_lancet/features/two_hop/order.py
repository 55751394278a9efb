"""One row per token and *node* that has any of its experts, and from there one per token and rank."""

from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.layout import NOTHING_IS_SENT, Blocker, Layout
from megatron_lancet.schedule.ops import Compute, Launch, Layer, OpKind, Verb, Wait

_HOPS: dict[Verb, Layer] = {
    Launch(OpKind.DISPATCH): (Launch(OpKind.NODE_DISPATCH),),
    # A chunk waits within its turn for the messages inside a node, which are short: otherwise its experts would wait
    # until the next chunk's rows have come from other nodes.
    Wait(OpKind.DISPATCH): (
        Wait(OpKind.NODE_DISPATCH),
        Compute(OpKind.NODE_ROWS),
        Launch(OpKind.LOCAL_DISPATCH),
        Wait(OpKind.LOCAL_DISPATCH, ends_turn=False),
    ),
    Launch(OpKind.COMBINE): (Launch(OpKind.LOCAL_COMBINE),),
    Wait(OpKind.COMBINE): (
        Wait(OpKind.LOCAL_COMBINE, ends_turn=False),
        Compute(OpKind.NODE_SUMS),
        Launch(OpKind.NODE_COMBINE),
        Wait(OpKind.NODE_COMBINE),
    ),
}
"""The verbs of two hops that replace a verb of one hop."""


class _TwoHop(Dispatch):
    name = "two-hop"
    description = "a token goes once to each node that holds any of its experts, and there once to each such rank"
    refusal = "dispatches in two hops"
    receiver = "node"
    rows = "one per token and node, and from there one per token and rank: fewer bytes between nodes"
    costs = "megatron_lancet.features.two_hop.costs:TwoHopCosts"
    measured_as = ("two-hop", "dedup")
    messages = {OpKind.DISPATCH: OpKind.NODE_DISPATCH, OpKind.COMBINE: OpKind.NODE_COMBINE}
    similar_ops = {OpKind.NODE_ROWS: OpKind.PREPROCESS, OpKind.NODE_SUMS: OpKind.POSTPROCESS}
    needs_nodes = True
    can_tile = False

    def order(self, layer: Layer) -> Layer:
        return tuple(own for verb in layer for own in _HOPS.get(verb, (verb,)))

    def blocker(self, layout: Layout) -> Blocker | None:
        if layout.num_experts < 1:
            return Blocker("the model has no experts", is_evident=True)
        if layout.ep_size <= 1:
            return Blocker(NOTHING_IS_SENT, is_evident=True)
        if layout.topk <= 1:
            return Blocker("a token has one expert (top-1), so no node gets it twice", is_evident=True)
        is_evident = layout.nodes is None
        if layout.pads_to_capacity:
            reason = "experts' inputs are padded to capacity, and padded rows belong to no rank's tokens"
            return Blocker(reason, is_evident)
        if layout.nodes is None:
            return Blocker("it is not known which ranks share a node", is_evident)
        return Blocker(layout.nodes) if isinstance(layout.nodes, str) else None


TWO_HOP: Dispatch = _TwoHop()
