"""A rank's gradient reductions, timed and on the link of the all-to-alls."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from megatron.core.distributed import param_and_grad_buffer

from benchmarks.demo.links.paced import PacedWire
from megatron_lancet.patching import around

_BUCKETS = param_and_grad_buffer._ParamAndGradBucketGroup


class Reductions:
    """Times the waits for Megatron's gradient reductions, and delays them on a paced link.

    If the kernel caps the rate of the link, Megatron's process groups are created on it, so reductions use it.
    """

    def __init__(self, wire: PacedWire | None) -> None:
        """
        Args:
            wire: the paced link; None if the kernel caps the rate.
        """
        self._wire = wire
        self._held: dict[Any, Future[None]] = {}
        self._waited_ms = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Times the reductions of Megatron's DDP, and delays them on a paced link."""
        with around(_BUCKETS, "start_grad_sync", self._start), around(_BUCKETS, "finish_grad_sync", self._finish):
            yield

    def take_waited_ms(self) -> float:
        """Returns the time this rank has waited for reductions since the last call."""
        waited_ms, self._waited_ms = self._waited_ms, 0.0
        return waited_ms

    def _start(self, stock: Callable[..., None], buckets: Any, *args: Any, **kwargs: Any) -> None:
        if self._wire is not None and buckets.grad_reduce_handle is None:
            _, self._held[buckets] = self._wire.send(reduced_bytes(buckets), lambda: None)
        stock(buckets, *args, **kwargs)

    def _finish(self, stock: Callable[..., None], buckets: Any, *args: Any, **kwargs: Any) -> None:
        start_s = time.perf_counter()
        stock(buckets, *args, **kwargs)  # also starts the reduction without --overlap-grad-reduce
        held = self._held.pop(buckets, None)
        if held is not None:
            held.result()
        self._waited_ms += (time.perf_counter() - start_s) * 1e3


def reduced_bytes(buckets: Any) -> int:
    """Returns the bytes a rank sends in the ring reduction of a group of buckets."""
    is_sharded = buckets.ddp_config.use_distributed_optimizer
    group = buckets.intra_distributed_optimizer_instance_group if is_sharded else buckets.data_parallel_group
    num_ranks, rounds = group.size(), 1 if is_sharded else 2  # a reduce-scatter, then an all-gather
    return sum(rounds * bucket.grad_data.nbytes * (num_ranks - 1) // num_ranks for bucket in buckets.buckets)
