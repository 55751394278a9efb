"""How the rows of a chunk get to their experts and back: which messages a layer has, and which ops next to them.

A plan has one :class:`Dispatch`. :data:`PLAIN` sends what stock sends. The others are features, which ``registry.py``
names. What a dispatch costs says its class of costs, which the planner loads and the model does not need.
"""

from collections.abc import Mapping
from enum import StrEnum
from functools import cache, cached_property
from typing import TYPE_CHECKING, Self, cast

from megatron_lancet import registry
from megatron_lancet.files.records import Named
from megatron_lancet.schedule.ops import Launch, Layer, OpKind, Wait

if TYPE_CHECKING:
    from megatron_lancet.schedule.layout import Blocker, Layout


class LocalTokens(StrEnum):
    """When a rank's experts work on local tokens, if rows go to other ranks in tiles."""

    HALF = "half"
    """One half while the dispatch is in flight, the other while the combine is."""
    AFTER = "after"
    """While the combine is in flight."""
    TILED = "tiled"
    """With the rows of other ranks: each tile has a part of them, so that the experts run once for each tile."""


_PLAIN_MESSAGES = (Launch(OpKind.DISPATCH), Wait(OpKind.DISPATCH), Launch(OpKind.COMBINE), Wait(OpKind.COMBINE))
NO_TILES = "this installation of Megatron-Lancet lacks features/tiles"


class Dispatch(Named):
    """The rows of all-to-alls, and their messages. The combine brings as many rows back.

    Two of the same name are equal. They sort by name.

    Attributes:
        description: what happens to a token, as a sentence without its end.
        refusal: what a plan does that has this dispatch, as a verb phrase.
        receiver: what gets a token once in the first message.
        rows: which rows a message has, for ``--help``.
        costs: dotted name of its :class:`~megatron_lancet.planning.dispatch.DispatchCosts`.
        measured_as: names of the dispatches whose ops do as much as its own, the nearest first; the plain one comes
            after them.
        messages: the messages that replace the plain dispatch and the plain combine, of those that are sent
            farthest.
        similar_ops: ops that the plain dispatch does not have, and plain ones that move rows in the same way.
        needs_nodes: whether messages need connections between nodes and inside a node.
        can_tile: whether the rows of a message can go in tiles.
        tiles: parts in which the rows of other ranks go; 0 for one message of all rows.
    """

    absent = (
        ", and this installation of Megatron-Lancet has no other folder of a dispatch in features/. Install the whole "
        "package, or make a plan with one of these"
    )
    description: str
    refusal: str
    receiver: str
    rows: str = ""
    costs: str
    measured_as: tuple[str, ...] = ()
    messages: Mapping[OpKind, OpKind] = {kind: kind for kind in (OpKind.DISPATCH, OpKind.COMBINE)}
    similar_ops: Mapping[OpKind, OpKind] = {}
    needs_nodes: bool = False
    can_tile: bool = True
    tiles: int = 0

    @classmethod
    def known(cls) -> Mapping[str, Self]:
        """The dispatches of this installation, simplest first."""
        return cast(Mapping[str, Self], registry.dispatches())

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Dispatch) and self.name == other.name)

    def __hash__(self) -> int:
        return hash(self.name)

    def __lt__(self, other: "Dispatch") -> bool:
        return self.name < other.name

    @property
    def is_plain(self) -> bool:
        """Whether all-to-alls carry what stock's carry."""
        return self == PLAIN

    @property
    def untiled(self) -> "Dispatch":
        """The same dispatch without tiles."""
        return self

    @cached_property
    def sent(self) -> tuple[OpKind, ...]:
        """The messages with rows of one chunk in the forward of a layer, in order."""
        return tuple(verb.kind for verb in self.order(_PLAIN_MESSAGES) if isinstance(verb, Launch))

    @property
    def all_to_alls_per_layer(self) -> int:
        """Number of messages with rows of one chunk in the forward of a layer."""
        return len(self.sent)

    def order(self, layer: Layer) -> Layer:
        """The verbs of a layer, of those with plain messages."""
        return layer

    def blocker(self, layout: "Layout") -> "Blocker | None":
        """Why a layout can't have it; None if it can. All else that a plan works with works with it."""
        return None

    def in_tiles(self, tiles: int, local_tokens: LocalTokens = LocalTokens.HALF) -> "Dispatch":
        """The same dispatch with its rows in tiles.

        Args:
            tiles: number of tiles; 0 for none.
            local_tokens: when the experts work on the rows that stay on the rank.

        Raises:
            ValueError: it can't have tiles.
        """
        if not tiles:
            return self
        if not registry.has_tiles():
            raise ValueError(f"tiles are not possible: {NO_TILES}. Install the whole package, or plan without tiles")
        if not self.can_tile:
            fitting = " or ".join(name for name, one in self.known().items() if one.can_tile)
            raise ValueError(f"tiles need dispatch {fitting}, not {self}")
        return _tiled(self, tiles, local_tokens)


@cache
def _tiled(dispatch: Dispatch, tiles: int, local_tokens: LocalTokens) -> Dispatch:
    tiled: Dispatch = registry.tiled()(dispatch, tiles, local_tokens)
    return tiled


class _Plain(Dispatch):
    name = "plain"
    description = "a token goes once to each of its experts"
    refusal = "sends plain rows"
    receiver = "expert"
    rows = "one per token and chosen expert, as stock"
    costs = "megatron_lancet.planning.dispatch:DispatchCosts"


PLAIN: Dispatch = _Plain()
"""One row per token and chosen expert, as in stock."""
