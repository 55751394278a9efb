"""Rows go to other ranks in tiles, a message each: the experts start with the rows that are here, and outputs leave
part by part (Comet section 3).
"""

from dataclasses import replace

from megatron_lancet.features.tiles.support import model_blocker
from megatron_lancet.schedule.dispatch import Dispatch, LocalTokens
from megatron_lancet.schedule.layout import NOTHING_IS_SENT, Blocker, Layout
from megatron_lancet.schedule.ops import Compute, Launch, Layer, OpKind, Verb, Wait

_TILED = (Wait(OpKind.DISPATCH), Compute(OpKind.EXPERTS), Launch(OpKind.COMBINE))


class Tiled(Dispatch):
    """Another dispatch in tiles; see :class:`~megatron_lancet.schedule.plan.Segment`.

    Attributes:
        local_tokens: when the experts work on local tokens.
    """

    costs = "megatron_lancet.features.tiles.costs:TiledCosts"
    can_tile = False

    def __init__(self, untiled: Dispatch, tiles: int, local_tokens: LocalTokens) -> None:
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
        """Parts in which the experts work on the rows that stay on the rank; 0 if the rows are in the tiles."""
        return {LocalTokens.HALF: 2, LocalTokens.AFTER: 1, LocalTokens.TILED: 0}[self.local_tokens]

    def order(self, layer: Layer) -> Layer:
        """All tiles leave at once and come back as they are done.

        The rows that stay on the rank run where it would otherwise wait: for the first tile, or for the first one back.
        Or they run with the tiles.
        """
        own_before: list[Verb] = []
        own_after: list[Verb] = []
        if self.local_tokens is LocalTokens.HALF:
            own_before, own_after = [Compute(OpKind.OWN_EXPERTS, 0)], [Compute(OpKind.OWN_EXPERTS, 1)]
        elif self.local_tokens is LocalTokens.AFTER:
            own_after = [Compute(OpKind.OWN_EXPERTS)]
        done: list[Verb] = []
        for verb in self._untiled.order(layer):
            if verb == _TILED[0]:
                done += own_before
                done += [_with_tile(step, tile) for tile in range(self.tiles) for step in _TILED]
                done += own_after
            elif verb in (Launch(OpKind.DISPATCH), Wait(OpKind.COMBINE)):
                done += [_with_tile(verb, tile) for tile in range(self.tiles)]
            elif verb not in _TILED:
                done.append(verb)
        return tuple(done)

    def blocker(self, layout: Layout) -> Blocker | None:
        if layout.ep_size <= 1:
            return Blocker(NOTHING_IS_SENT, is_evident=True, advice="raise --expert-model-parallel-size")
        return model_blocker(layout.is_quantized) or self._untiled.blocker(layout)


def _with_tile(verb: Verb, tile: int) -> Verb:
    # A chunk waits within its turn for the tiles behind the first one.
    return replace(verb, tile=tile, ends_turn=not tile) if isinstance(verb, Wait) else replace(verb, tile=tile)
