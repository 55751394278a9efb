"""A rank's link: it carries the reductions and the all-to-alls of both variants, over the same connections."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.demo.links.paced import Pace, PacedTransport, PacedWire
from benchmarks.demo.links.reductions import Reductions
from benchmarks.training_step.links import groups_on
from benchmarks.training_step.stock_messages import StockMessages
from megatron_lancet.patching import around
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.base import Transport
from megatron_lancet.runtime.transport.select import make_transport
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span
from megatron_lancet.training import overlap_setup
from megatron_lancet.training.megatron import patches

_TIMEOUT = timedelta(minutes=3)
_CPU = torch.device("cpu")


class RankLink:
    """A rank's route for messages: an interface whose rate the kernel caps, or a paced transport.

    Attributes:
        pace: rate of the paced transport.
        reductions: gradient reductions on the same link.
    """

    def __init__(self, interface: str | None) -> None:
        """
        Args:
            interface: name of the capped interface; None for a paced transport.
        """
        self._interface = interface
        self.pace = Pace(1e12)
        self._wire = PacedWire(self.pace) if interface is None else None
        self.reductions = Reductions(self._wire)

    def connect(self, make: Callable[..., Transport], ep_group: dist.ProcessGroup, *rest: Any) -> Transport:
        """The transport that ``make`` makes over this link; takes the arguments of ``make_transport``. Collective."""
        with self.groups():
            transport = make(ep_group, *rest)
        if self._wire is None:
            return transport
        _, _, stats, _ = rest
        return PacedTransport(transport, ep_group.rank(), self._wire, stats)

    def groups(self) -> AbstractContextManager[None]:
        """Inside, groups of gloo's are made on this link."""
        return nullcontext() if self._interface is None else groups_on(self._interface)

    @contextmanager
    def carries_reductions(self) -> Iterator[None]:
        """Sends gradient reductions and all other traffic of Megatron's own groups over the link."""

        def connect(stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            with self.groups():
                stock(*args, **kwargs)

        with around(parallel_state, "initialize_model_parallel", connect), self.reductions.watched():
            yield

    def carries_ours(self) -> AbstractContextManager[None]:
        """Inside, the transport of the overlapping block is made over this link."""
        return around(overlap_setup, "make_transport", self.connect)

    def carries_stock(self, traced: "StockTrace") -> AbstractContextManager[None]:
        """Inside, stock's all-to-alls take the transport that ours take, and each is waited for at once."""

        def communication(stock: Any, stats: CommStats) -> AbstractContextManager[None]:
            return StockMessages(stats, cache(partial(self._connect_stock, stats)), traced.waiting).sent()

        return around(patches, "measured_stock_communication", communication)

    def _connect_stock(self, stats: CommStats) -> tuple[Transport, dist.ProcessGroup]:
        """Collective."""
        group = parallel_state.get_expert_model_parallel_group()
        transport = self.connect(make_transport, group, group, _CPU, stats, _TIMEOUT)
        with self.groups():
            return transport, dist.new_group(backend="gloo", timeout=_TIMEOUT)


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
    def waiting(self, name: str, num_bytes: int) -> Iterator[None]:
        """Notes a wait for a message that is launched at its begin."""
        start_ms = (time.perf_counter() - self._start_s) * 1e3
        yield
        if self._spans is not None:
            end_ms = (time.perf_counter() - self._start_s) * 1e3
            self._spans += [Span(name, lane, start_ms, end_ms, num_bytes) for lane in (Lane.COMM, Lane.WAIT)]
