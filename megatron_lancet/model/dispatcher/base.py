"""What the ops of a layer ask of a dispatcher, whatever a row stands for.

Legend of shapes: t tokens of the chunk, E experts, N rows sent, M rows that the local experts' rank works on, m rows of
the local experts, H hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megatron_lancet.model.dispatcher.distinct_rows import PlainRows
from megatron_lancet.model.dispatcher.routes import DistinctRoutes, PendingRoutes, Routes, TwoHopRoutes
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.ops import Op

type AnyRoutes = Routes | DistinctRoutes | TwoHopRoutes


class Dispatcher(Protocol):
    """Moves rows between tokens' ranks and experts' ranks, in the order of these methods; without state between calls.

    Routes and permutations are a dispatcher's own and come back to it.
    """

    def launch_counts(self, op: Op, routing_map_tE: torch.Tensor, routed: ReadyEvent) -> PendingRoutes[Any]:
        """Tells every rank how many rows it gets from here.

        Args:
            routing_map_tE: bool; to be kept until the counts have been waited for.
            routed: the point in time at which ``routing_map_tE`` was complete.
        """

    def most_rows(self, num_tokens: int, topk: int) -> int:
        """The largest number of rows that a chunk sends.

        Args:
            topk: experts of a token at most.
        """

    def permute(
        self, hidden_sbH: torch.Tensor, probs_tE: torch.Tensor, routing_map_tE: torch.Tensor, num_rows: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], Any]:
        """Makes a chunk's rows, ordered by the rank that they go to: tokens [N, H] and their probabilities [N, ...].

        Args:
            num_rows: N, or more: rows behind those that are sent stay here, and have no meaning.

        Returns:
            The rows, and how to put them back.
        """

    def of_each_expert(
        self, rows: tuple[torch.Tensor, ...], sent: Sequence[int], rows_per_expert: Sequence[int]
    ) -> PlainRows:
        """Makes of the rows that a chunk sends those of the plain dispatch, with a row for each token and expert.

        Args:
            rows: tokens [N, H] and their probabilities [N, ...]; those behind the rows that are sent don't count.
            sent: rows of the first message to each rank that it connects.
            rows_per_expert: E in all.
        """

    def collect(
        self, received: tuple[torch.Tensor, ...], routes: Any, last_expert_first: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """What is kept for the experts of the rows received: tokens [M, H] and their probabilities [M, ...]."""

    def through_experts(
        self,
        run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        tokens: torch.Tensor,
        probs: torch.Tensor,
        routes: Any,
        last_expert_first: bool = False,
    ) -> torch.Tensor:
        """Runs the experts; [M, H]. With recompute it runs again in the backward pass, from ``tokens`` and ``probs``.

        Args:
            run: maps rows [m, H] and their probabilities [m], ordered by expert, to outputs [m, H].
        """

    def sort_by_peer(
        self, output: torch.Tensor, routes: Any, sum_dtype: torch.dtype, last_expert_first: bool = False
    ) -> torch.Tensor:
        """The rows that go back, in rank order.

        Args:
            sum_dtype: type in which the parts of an expert that tensor parallelism cuts are summed.
        """

    def unpermute(self, rows: torch.Tensor, permutation: Any) -> torch.Tensor:
        """Sums the rows [N, H] of each token: the chunk's output, [s, b, H]."""
