"""The link of a rank: over it go the all-to-alls of both variants, by the same connections."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import token_dispatcher

from benchmarks.demo.paced import Pace, PacedTransport
from benchmarks.training_step.links import groups_on
from megatron_lancet.patching import around
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.base import Transport
from megatron_lancet.runtime.transport.select import make_transport
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span
from megatron_lancet.training import overlap_setup
from megatron_lancet.training.megatron import patches

_TIMEOUT = timedelta(minutes=3)
_CPU = torch.device("cpu")


class RankLink:
    """Where the all-to-alls of a rank go: to an interface whose rate the kernel caps, or through a paced transport."""

    def __init__(self, interface: str | None) -> None:
        """
        Args:
            interface: name of the capped interface; None for a paced transport.
        """
        self._interface = interface
        self.pace = Pace(1e12)

    def connect(self, make: Callable[..., Transport], ep_group: dist.ProcessGroup, *rest: Any) -> Transport:
        """The transport that ``make`` makes over this link; takes the arguments of ``make_transport``. Collective."""
        with self.groups():
            transport = make(ep_group, *rest)
        if self._interface is not None:
            return transport
        _, _, stats, _ = rest
        return PacedTransport(transport, ep_group.rank(), self.pace, stats)

    def groups(self) -> AbstractContextManager[None]:
        """Inside, groups of gloo's are made on this link."""
        return nullcontext() if self._interface is None else groups_on(self._interface)

    def carries_ours(self) -> AbstractContextManager[None]:
        """Inside, the transport of the overlapping block is made over this link."""
        return around(overlap_setup, "make_transport", self.connect)

    def carries_stock(self, traced: "StockTrace") -> AbstractContextManager[None]:
        """Inside, stock's all-to-alls take the transport that ours take, and each is waited for at once."""

        def communication(stock: Any, stats: CommStats) -> AbstractContextManager[None]:
            return _StockOnLink(self, stats, traced).carries()

        return around(patches, "measured_stock_communication", communication)


class StockTrace:
    """The waits of a step of stock modules."""

    def __init__(self) -> None:
        self._spans: list[Span] | None = None
        self._start_s = 0.0

    def run(self, rank: int, step: Callable[[], Any]) -> tuple[Any, RankTimeline]:
        """Runs a step, and returns its result and its waits: on a rank that overlaps nothing, all else is compute."""
        self._spans, self._start_s = [], time.perf_counter()
        result = step()
        spans, self._spans = self._spans, None
        return result, RankTimeline(rank, tuple(spans), (time.perf_counter() - self._start_s) * 1e3)

    @contextmanager
    def waiting(self, name: str, num_bytes: int = 0) -> Iterator[None]:
        """Notes a wait for a message that is launched at its begin."""
        start_ms = (time.perf_counter() - self._start_s) * 1e3
        yield
        if self._spans is not None:
            end_ms = (time.perf_counter() - self._start_s) * 1e3
            self._spans += [Span(name, lane, start_ms, end_ms, num_bytes) for lane in (Lane.COMM, Lane.WAIT)]


class _StockOnLink:
    """Stock's communication on the link. Its groups are made by the first message, at the same place on all ranks."""

    def __init__(self, link: RankLink, stats: CommStats, traced: StockTrace) -> None:
        self._link = link
        self._stats = stats
        self._traced = traced
        self._connected: tuple[Transport, dist.ProcessGroup] | None = None

    @contextmanager
    def carries(self) -> Iterator[None]:
        with (
            around(dist, "all_to_all_single", self._all_to_all),
            around(token_dispatcher, "gather_from_sequence_parallel_region", self._gather_counts),
        ):
            yield

    def _connection(self) -> tuple[Transport, dist.ProcessGroup]:
        if self._connected is None:
            group = parallel_state.get_expert_model_parallel_group()
            transport = self._link.connect(make_transport, group, group, _CPU, self._stats, _TIMEOUT)
            with self._link.groups():
                self._connected = transport, dist.new_group(backend="gloo", timeout=_TIMEOUT)
        return self._connected

    def _all_to_all(
        self,
        stock: Callable[..., Any],
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if group is not parallel_state.get_expert_model_parallel_group():  # the transport's own messages
            return stock(output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op)
        assert not async_op
        assert output_split_sizes is not None
        assert input_split_sizes is not None
        received, sent = ([int(rows) for rows in sizes] for sizes in (output_split_sizes, input_split_sizes))
        num_rows = sum(sent) - sent[dist.get_rank(group)]
        num_bytes = num_rows * input.element_size() * input.shape[1:].numel()
        self._stats.add("num_all_to_alls", 1)
        self._stats.add("payload_bytes", num_bytes)
        transport, _ = self._connection()
        with self._traced.waiting(str(Op.beside_layers(Phase.FORWARD, OpKind.DISPATCH)), num_bytes):
            transport.launch(output, input, received, sent).wait()
        return None

    def _gather_counts(self, stock: Callable[..., Any], input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert not input_.requires_grad, "without tensor parallelism only counts are gathered"
        _, kwargs["group"] = self._connection()
        counts = str(Op.beside_layers(Phase.FORWARD, OpKind.COUNTS))
        with self._stats.waiting("counts_exposed_ms"), self._traced.waiting(counts):
            return stock(input_, *args, **kwargs)
