"""Weight gradients of experts whose rows come in parts: one GEMM over the rows of all parts, as without parts.

Each part's backward returns dX at once and hands over the two factors of its dW. With the last part's the factors of
all are complete, and one dW is put. Its rows are in the order that they would have if they had come in one message: by
source, and there by token. So it is the same sum.

Legend of shapes: T rows of an expert in one part, or in all, I inputs, O outputs, S sources, e local experts.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_lancet.runtime.factors import Factors
from megatron_lancet.runtime.weight_grad_store import WeightGradStore


class Piece(NamedTuple):
    """Neighbouring rows of an expert in one part: those from ``start`` to ``end``."""

    part: int
    start: int
    end: int


def pieces_of(rows_oS: Sequence[Sequence[int]]) -> list[Piece]:
    """The rows of an expert by source, and there by part, as pieces of its rows in each part, which are by source.

    Args:
        rows_oS: rows of the expert in each part from each source.
    """
    pieces: list[Piece] = []
    ends = [0] * len(rows_oS)
    for of_source in zip(*rows_oS, strict=True):
        for part, num_rows in enumerate(of_source):
            if not num_rows:
                continue
            start, ends[part] = ends[part], ends[part] + num_rows
            if pieces and pieces[-1].part == part:
                start = pieces.pop().start  # the rows before these are from another source of the same part
            pieces.append(Piece(part, start, ends[part]))
    return pieces


@dataclass(frozen=True)
class PartsOfRows:
    """The factors of an expert's dW in all parts.

    Attributes:
        parts: of each part.
        pieces: the order of their rows.
    """

    parts: Sequence[Factors]
    pieces: Sequence[Piece]

    @property
    def num_bytes(self) -> int:
        """Memory that the parts keep alive."""
        return sum(part.num_bytes for part in self.parts)

    def joined(self) -> Factors:
        """The factors of all rows; copies unless they are all in one part."""
        if not self.pieces:
            return self.parts[0]
        grads = [self.parts[part].grad_TO[start:end] for part, start, end in self.pieces]
        inputs = [self.parts[part].input_TI[start:end] for part, start, end in self.pieces]
        return Factors(_joined(grads), _joined(inputs))


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class GatheredWeightGrads:
    """Gathers the factors of the dWs of a chunk's experts in one layer."""

    def __init__(
        self,
        num_parts: int,
        received_by_source: Callable[[], torch.Tensor],
        expert_of: Mapping[Hashable, int],
        store: WeightGradStore | None,
    ) -> None:
        """
        Args:
            received_by_source: returns the rows of each part from each source for each local expert, [parts, S, e];
                called in the backward pass.
            expert_of: the local expert of each linear layer that is one expert's.
            store: takes the dWs; None where none is deferred.
        """
        self._store = store
        self._num_parts = num_parts
        self._received_by_source = received_by_source
        self._expert_of = expert_of
        self._gathered: dict[tuple[Hashable, int], dict[int, Factors]] = {}
        self._pieces: list[list[Piece]] = []

    @contextmanager
    def in_part(self, part: int) -> Iterator[None]:
        """Inside, linear layers run on the rows of a part of the chunk.

        A forward paired with a backward changes places with it at waits only, of which there are none inside a part.
        """
        if self._store is None:
            yield
            return
        outer, self._store.part = self._store.part, PartOfRows(self, part)
        try:
            yield
        finally:
            self._store.part = outer

    def add(self, linear: Hashable, expert: int, part: int, factors: Factors) -> PartsOfRows | None:
        """Takes the factors of a part's dW.

        Args:
            linear: layer of the expert.
            expert: local expert.

        Returns:
            The gradients of all parts when they are complete, else None.
        """
        parts = self._gathered.setdefault((linear, expert), {})
        assert part not in parts, f"part {part} has come twice"
        parts[part] = factors
        if len(parts) < self._num_parts:
            return None
        del self._gathered[linear, expert]
        return PartsOfRows([parts[index] for index in range(self._num_parts)], self.pieces(expert))

    def expert_of(self, linear: Hashable) -> int:
        """The local expert of a linear layer that is one expert's."""
        return self._expert_of[linear]

    def pieces(self, expert: int) -> list[Piece]:
        """The order of the rows of a local expert."""
        if not self._pieces:
            rows_eoS = self._received_by_source().permute(2, 0, 1).tolist()
            self._pieces = [pieces_of(rows_oS) for rows_oS in rows_eoS]
        return self._pieces[expert]


@dataclass(frozen=True)
class PartOfRows:
    """The part of a chunk's rows on which linear layers of experts run.

    Attributes:
        weight_grads: of the chunk.
        part: its number.
    """

    weight_grads: GatheredWeightGrads
    part: int

    def add(self, linear: Hashable, factors: Factors, expert: int | None = None) -> PartsOfRows | None:
        """See :meth:`GatheredWeightGrads.add`.

        Args:
            expert: None for a linear layer that is one expert's.
        """
        expert = self.weight_grads.expert_of(linear) if expert is None else expert
        return self.weight_grads.add(linear, expert, self.part, factors)
