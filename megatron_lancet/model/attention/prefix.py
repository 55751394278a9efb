"""Keys or values of a micro-batch's positions so far, kept once for all sequence chunks.

Concatenating them for each chunk would keep them once per chunk: attention saves its inputs for the backward pass.
Legend of shapes: S positions of the sequence, s of a chunk, s' of it and the chunks before it, b chunk size, g key
heads, k channels of a head.
"""

from typing import Any

import torch


class Prefix:
    """A tensor that is filled chunk by chunk; each chunk gets the part that has been filled."""

    def __init__(self, num_positions: int) -> None:
        """For keys or values of ``num_positions`` positions, S."""
        self._num_positions = num_positions
        self._room: torch.Tensor | None = None
        self._seen: list[torch.Tensor] = []

    def up_to(self, own: torch.Tensor, index: int, keep: bool) -> torch.Tensor:
        """Returns all positions up to a chunk's last one, [s', b, g, k], and keeps the chunk's own for later chunks.

        A recomputed chunk calls a second time in the backward pass, the last chunk first.

        Args:
            own: keys or values of the chunk, [s, b, g, k].
            index: the chunk's index.
            keep: whether there will be another call for this micro-batch.
        """
        if self._room is None:
            self._room = own.new_empty((self._num_positions, *own.shape[1:]))
        earlier = self._seen[index - 1] if index > 0 else None
        prefix = _Extended.apply(self._room, own, earlier)
        again = len(self._seen) > index
        del self._seen[index:]
        if keep and not again:
            self._seen.append(prefix)
            if len(prefix) == self._num_positions:  # with its graph it would live on where no backward pass runs
                self._seen = [one.detach() for one in self._seen]
        elif index == 0:  # recomputed: the first chunk is the last to call
            self._room = None
        return prefix


class _Extended(torch.autograd.Function):
    """Writes a chunk's rows behind the earlier ones, in the same memory."""

    @staticmethod
    def forward(ctx: Any, room: torch.Tensor, own: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
        start = 0 if earlier is None else len(earlier)
        ctx.start = start
        # Autograd refuses a saved tensor that was written since. What it has saved of this one are earlier rows, and
        # these stay: .data has a version count of its own.
        rows = room.data
        rows[start : start + len(own)] = own
        return rows[: start + len(own)]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor | None]:
        return None, grad[ctx.start :], grad[: ctx.start] if ctx.start else None
