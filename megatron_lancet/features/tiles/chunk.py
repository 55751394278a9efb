"""The rows of a chunk in parts: cut before they leave, joined when they are back.

Legend of shapes: N rows that a chunk sends, ordered by the rank that they go to, n rows of one part, P ranks of the
expert-parallel group, H hidden size.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from megatron_lancet.features.tiles.parts import PartedRoutes
from megatron_lancet.features.tiles.weight_grads import GatheredWeightGrads
from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.recorder import Recorder
from megatron_lancet.schedule.ops import Op, OpKind

Rows = tuple[torch.Tensor, ...]


class ChunkInParts:
    """A chunk's rows in parts, and the messages with the tiles that are in flight.

    Attributes:
        routes: of each part.
        weight_grads: gathers the dWs of all parts.
        rows: of the parts that are here, by part: to be sent, or to go through the experts, or their outputs.
    """

    def __init__(self, routes: PartedRoutes[Any], weight_grads: GatheredWeightGrads, rows: Rows) -> None:
        """Cuts the rows of a chunk. Waits for this rank's own counts.

        Args:
            rows: tokens [N, H] and their probabilities [N, ...]; those behind the rows that are sent have no meaning.
        """
        self.routes = routes
        self.weight_grads = weight_grads
        self.rows: dict[int, Rows] = {}
        self._messages: dict[int, tuple[AllToAll, torch.Tensor]] = {}
        self._cut(rows)

    def _cut(self, rows: Rows) -> None:
        sizes = list(itertools.chain(*self.routes.sent))
        cut = [tensor[: sum(sizes)].split(sizes) for tensor in rows]
        tiling, own_rank = self.routes.tiling, self.routes.own_rank
        first_of_rank = list(itertools.accumulate(map(len, self.routes.sent), initial=0))[:-1]
        for part in range(tiling.num_own):
            place = first_of_rank[own_rank] + part
            # Of what an expert keeps of its input, a view would keep all rows.
            self.rows[part] = tuple(pieces[place].clone() for pieces in cut)
        others = [first for rank, first in enumerate(first_of_rank) if rank != own_rank]
        for tile in range(tiling.num_tiles):
            self.rows[tiling.part_of_tile(tile)] = tuple(
                _joined([pieces[first + tile] for first in others], tensor)
                for pieces, tensor in zip(cut, rows, strict=True)
            )

    def joined(self) -> torch.Tensor:
        """The outputs of all parts, [N, H], in the order of the rows before they were cut."""
        tiling, own_rank = self.routes.tiling, self.routes.own_rank
        own = [self.rows.pop(part)[0] for part in range(tiling.num_own)]
        tiles = []
        for tile in range(tiling.num_tiles):
            (output,) = self.rows.pop(tiling.part_of_tile(tile))
            tiles.append(output.split(self.routes.sent_in(tile)))
        pieces: list[torch.Tensor] = []
        for rank in range(len(self.routes.sent)):
            pieces += own if rank == own_rank else [tile[rank] for tile in tiles]
        return torch.cat(pieces)

    def launch(self, tile: int, message: AllToAll) -> None:
        """Launches the message with a tile."""
        self._messages[tile] = message, message.launch(*self.rows.pop(self.routes.tiling.part_of_tile(tile)))

    def wait(self, tile: int) -> None:
        """Waits for the message with a tile."""
        message, ticket = self._messages.pop(tile)
        self.rows[self.routes.tiling.part_of_tile(tile)] = message.wait(ticket)

    def part_of(self, op: Op) -> int:
        """The part on which an op of experts works."""
        if op.kind == OpKind.OWN_EXPERTS:
            return op.tile or 0
        assert op.tile is not None
        return self.routes.tiling.part_of_tile(op.tile)

    def trace(self, trace: Recorder, op: Op) -> None:
        """Traces the number of rows on which an op of experts works, and where its backward ends without a message."""
        part = self.part_of(op)
        trace.received(str(op), self.routes.routes(part).num_rows)
        if op.kind == OpKind.OWN_EXPERTS:
            tokens, *others = self.rows[part]
            self.rows[part] = trace.boundary(tokens, str(op.mirrored())), *others


def _joined(pieces: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """The pieces of a tile, or none of the rows where there are no other ranks."""
    if not pieces:
        return rows[:0]
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
