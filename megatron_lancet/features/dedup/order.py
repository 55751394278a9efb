"""One row per token and *rank* that holds any of its experts: the rank expands it and sums what goes back.

Messages and order of ops are the same as in the plain dispatch.
"""

from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.layout import NOTHING_IS_SENT, Blocker, Layout


class _Dedup(Dispatch):
    name = "dedup"
    description = "a token goes once to each rank that holds any of its experts"
    refusal = "deduplicates dispatched rows"
    receiver = "rank"
    rows = "one per token and rank that holds any of its experts: fewer bytes where a rank holds several"
    costs = "megatron_lancet.features.dedup.costs:DedupCosts"
    measured_as = ("dedup",)

    def blocker(self, layout: Layout) -> Blocker | None:
        if layout.num_experts < 1:
            return Blocker("the model has no experts", is_evident=True)
        if layout.ep_size <= 1:
            return Blocker(NOTHING_IS_SENT, is_evident=True)
        if layout.topk <= 1:
            return Blocker("a token has one expert (top-1), so no rank gets it twice", is_evident=True)
        if layout.num_experts <= layout.ep_size:
            return Blocker("a rank has one expert, so no rank gets a token twice")
        if layout.pads_to_capacity:
            return Blocker("experts' inputs are padded to capacity, and padded rows belong to no rank's tokens")
        return None


DEDUP: Dispatch = _Dedup()
