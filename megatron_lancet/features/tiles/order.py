"""Rows go to other ranks in tiles, a message each: the experts start with the rows that are here, and outputs leave
part by part (Comet section 3). By expert, a tile has all rows of a group of experts (EPS-MoE section 3).
"""

from dataclasses import replace

from megatron_lancet.features.tiles.support import groups_blocker, model_blocker
from megatron_lancet.schedule.dispatch import Dispatch, LocalTokens
from megatron_lancet.schedule.layout import NOTHING_IS_SENT, Blocker, Layout
from megatron_lancet.schedule.ops import Compute, Launch, Layer, OpKind, Verb, Wait

_TILED = (Wait(OpKind.DISPATCH), Compute(OpKind.EXPERTS), Launch(OpKind.COMBINE))
_OWN_PARTS = {LocalTokens.HALF: (0, 1), LocalTokens.AFTER: (None,), LocalTokens.BY_EXPERT: ()}
"""Tiles that the ops on the rows that stay are named by, in order."""


class Tiled(Dispatch):
    """Another dispatch in tiles; see :class:`~megatron_lancet.schedule.plan.Segment`.

    Attributes:
        local_tokens: when the experts work on local tokens.
    """

    costs = "megatron_lancet.features.tiles.costs:TiledCosts"
    can_tile = False

    def __init__(self, untiled: Dispatch, tiles: int, local_tokens: LocalTokens) -> None:
        """
        Raises:
            ValueError: the tiles are by expert, and rows are not of one expert each.
        """
        if local_tokens is LocalTokens.BY_EXPERT and not untiled.is_plain:
            raise ValueError(f"tiles by expert need dispatch plain, not {untiled}, whose rows go to several experts")
        self._untiled = untiled
        self.tiles = tiles
        self.local_tokens = local_tokens
        self.name = f"{untiled} tiles={tiles} local-tokens={local_tokens}"
        self.description, self.refusal, self.receiver = untiled.description, "sends rows in tiles", untiled.receiver
        self.measured_as, self.messages, self.needs_nodes = untiled.measured_as, untiled.messages, untiled.needs_nodes

    @property
    def untiled(self) -> Dispatch:
        return self._untiled

    @property
    def num_own_parts(self) -> int:
        """Parts in which the experts work on the rows that stay on the rank."""
        return len(_OWN_PARTS[self.local_tokens])

    def order(self, layer: Layer) -> Layer:
        """All tiles leave at once and come back as they are done.

        The rows that stay on the rank run where it would otherwise wait: for the first tile, or for the first one back.
        """
        own = [Compute(OpKind.OWN_EXPERTS, tile) for tile in _OWN_PARTS[self.local_tokens]]
        done: list[Verb] = []
        for verb in self._untiled.order(layer):
            if verb == _TILED[0]:
                done += own[:-1]
                done += [_with_tile(step, tile) for tile in range(self.tiles) for step in _TILED]
                done += own[-1:]
            elif verb in (Launch(OpKind.DISPATCH), Wait(OpKind.COMBINE)):
                done += [_with_tile(verb, tile) for tile in range(self.tiles)]
            elif verb not in _TILED:
                done.append(verb)
        return tuple(done)

    def blocker(self, layout: Layout) -> Blocker | None:
        if layout.ep_size <= 1:
            return Blocker(NOTHING_IS_SENT, is_evident=True, advice="raise --expert-model-parallel-size")
        why_not = model_blocker(layout.is_quantized, layout.has_row_bound) or self._untiled.blocker(layout)
        if why_not is None and self.local_tokens is LocalTokens.BY_EXPERT:
            why_not = groups_blocker(self.tiles, layout.num_experts // layout.ep_size)
        return why_not


def _with_tile(verb: Verb, tile: int) -> Verb:
    # A chunk waits within its turn for the tiles behind the first one.
    return replace(verb, tile=tile, ends_turn=not tile) if isinstance(verb, Wait) else replace(verb, tile=tile)
