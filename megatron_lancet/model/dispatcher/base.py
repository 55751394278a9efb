"""The interface of dispatchers for the ops of a layer, whatever a row stands for.

Legend of shapes: t tokens of the chunk, E experts, Q ranks that exchange counts, c counts for each, N rows sent, M rows
that the local experts' rank works on, m rows of the local experts, H hidden size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from megatron_lancet.model.dispatcher.routes import CountsLimit, PendingRoutes, Routes
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.exchange import CountsExchange
from megatron_lancet.runtime.rows.sums import Places
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.ops import Op


class PlainRows(NamedTuple):
    """A row for each token and expert, ordered by expert.

    Attributes:
        tokens: [m, H].
        probs: [m].
        place: the distinct row that each is a copy of; None if they are these rows.
    """

    tokens: torch.Tensor
    probs: torch.Tensor
    place: Places | None


class ExpertRanks(NamedTuple):
    """The ranks among which a layer's experts are divided.

    Attributes:
        comm: all-to-alls of the model.
        num_experts: experts of the layer.
        num_ranks: ranks of the expert-parallel group.
        expert_tp_group: the ranks that hold the parts of the same experts.
        rank: this rank's place in the expert-parallel group.
    """

    comm: Comm
    num_experts: int
    num_ranks: int
    expert_tp_group: dist.ProcessGroup
    rank: int


class Dispatcher(Protocol):
    """Moves rows between tokens' ranks and experts' ranks, in the order of these methods; without state between calls.

    Routes and permutations are a dispatcher's own and come back to it.

    Attributes:
        has_plain_rows: whether there is a row for each token and expert, as in stock.
        tp_size: ranks that hold the parts of the same experts.
        tp_rank: this rank's place among them.
    """

    has_plain_rows: bool
    tp_size: int
    tp_rank: int

    def launch_counts(
        self, op: Op, routing_map_tE: torch.Tensor, routed: ReadyEvent, limit: CountsLimit | None = None
    ) -> PendingRoutes[Any]:
        """Tells every rank how many rows it gets from here.

        Args:
            routing_map_tE: bool; to be kept until the counts have been waited for.
            routed: the point in time at which ``routing_map_tE`` was complete.
            limit: a limit that needs the counts of all ranks; None without one.
        """

    def even_routes(self, rows_per_expert: int, device: torch.device) -> Routes:
        """The routes of a chunk in which every rank sends equally many rows to every expert; sends no counts.

        Args:
            rows_per_expert: rows from one rank for one expert.
            device: device of the rows.
        """

    def num_rows(
        self, probs_tE: torch.Tensor, topk: int, drops_tokens: bool, routes: PendingRoutes[Any] | Routes
    ) -> int:
        """The number of rows to make of a chunk: as many as it sends, or more.

        Args:
            topk: experts of a token at most.
            drops_tokens: whether a token may have fewer experts.
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

    def expand(self, rows: tuple[torch.Tensor, ...], sent: Sequence[int], rows_per_expert: Sequence[int]) -> PlainRows:
        """Expands the rows that a chunk sends to plain rows: one row for each token and expert.

        Args:
            rows: tokens [N, H] and their probabilities [N, ...]; those behind the rows that are sent don't count.
            sent: rows of the first message to each rank that it connects.
            rows_per_expert: E in all.
        """

    def collect(
        self, received: tuple[torch.Tensor, ...], routes: Any, last_expert_first: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """The tensors kept for the experts from the rows received: tokens [M, H] and their probabilities [M, ...]."""

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


def launch_counts(
    comm: Comm,
    op: Op,
    count: Callable[[], torch.Tensor],
    routing_map_tE: torch.Tensor,
    routed: ReadyEvent,
    num_peers: int,
    limit: CountsLimit | None = None,
) -> CountsExchange:
    """Launches the exchange of a chunk's counts.

    Args:
        count: returns the counts for each peer, [Q * c].
        routing_map_tE: bool; to be kept until the counts have been waited for.
        routed: the point in time at which ``routing_map_tE`` was complete.
        num_peers: Q.
        limit: see :class:`Dispatcher`.
    """
    if limit is not None:
        count = partial(limit.with_counts_of_all, count, routing_map_tE, num_peers)
    return comm.launch_counts(op, count, routed)


def of_all_parts(rows: Sequence[torch.Tensor], group: dist.ProcessGroup, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Gathers rows from the ranks that hold the parts of the same experts; ``sizes`` are the numbers of their rows."""
    make = partial(gather_from_sequence_parallel_region, group=group, output_split_sizes=list(sizes))
    return [make(one.contiguous()) for one in rows]  # NCCL refuses views


def sum_parts(rows: torch.Tensor, group: dist.ProcessGroup, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Sums rows over the ranks that hold the parts of the same experts; each keeps its own, as many as in ``sizes``."""
    make = partial(reduce_scatter_to_sequence_parallel_region, group=group, input_split_sizes=list(sizes))
    return make(rows.to(dtype)).to(rows.dtype)
