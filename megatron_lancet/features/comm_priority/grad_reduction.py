"""Megatron DDP's gradient reductions, cut into micro-ops that a scheduler launches.

DDP does everything but the collective itself, as before: it decides when a bucket is complete (the last micro-batch,
the first batch's order), checks for NaN, scales, chooses the operation, and waits before the optimizer. Only the
collectives that it starts inside its coalescing manager are recorded instead and become micro-ops; the manager yields
the handle that DDP waits for.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import param_and_grad_buffer as ddp_buffers

from megatron_lancet.errors import UsageError
from megatron_lancet.features.comm_priority.comm_scheduler import CommScheduler, PendingReduction
from megatron_lancet.patching import around, replaced
from megatron_lancet.runtime.device import on_cuda
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.reductions import MicroOps
from megatron_lancet.training.megatron.seams import missing_functions

_BUCKET_GROUP = ddp_buffers._ParamAndGradBucketGroup
_START_GRAD_SYNC = (
    "_coalescing_manager(communication_group, async_ops=async_op) as cm",
    "dist_reduce_scatter_func(",
    "torch.distributed.all_reduce(",
    "self.grad_reduce_handle = cm",
)
"""Parts of DDP's ``start_grad_sync`` on which this file relies."""


def missing_seams() -> Iterator[str]:
    """Yields what Megatron lacks of what this file replaces."""
    if missing := missing_functions([(_BUCKET_GROUP, "start_grad_sync", ())]):
        yield from missing
        return
    source = inspect.getsource(_BUCKET_GROUP.start_grad_sync)
    yield from (f"start_grad_sync's {part!r}" for part in _START_GRAD_SYNC if part not in source)


class _Collective:
    """A collective on a part of a bucket; its work, and what it sends until it is done.

    Attributes:
        gradients: [n], the part of the bucket that holds the result on this rank.
        ready: point at which DDP had scaled the gradients, on a stream of its own. Set before the launch.
    """

    num_bytes: int
    gradients: torch.Tensor
    ready: ReadyEvent
    _work: dist.Work | None = None
    _sent: torch.Tensor | None = None

    def launch(self) -> None:
        self.ready.block_current()
        self._work = self._start()

    def _start(self) -> dist.Work:
        raise NotImplementedError

    def wait(self) -> None:
        assert self._work is not None, "a gradient micro-op was waited for before it was launched"
        self._work.wait()
        if self._sent is not None and on_cuda(self._sent):
            # It may be memory of the stream that launched the collective. That stream has not waited; this one has.
            self._sent.record_stream(torch.cuda.current_stream())
        self._sent = None

    def release_if_done(self) -> bool:
        if self._work is not None and not self._work.is_completed():
            return False
        self._sent = None
        return True


class _AllReduce(_Collective):
    """Sums a slice of a bucket over all ranks of a group."""

    def __init__(self, gradients: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
        """
        Args:
            gradients: [n], a view of the bucket; reduced in place.
        """
        self.num_bytes = gradients.nbytes
        self.gradients = gradients
        self._op = op
        self._group = group

    def _start(self) -> dist.Work:
        return dist.all_reduce(self.gradients, op=self._op, group=self._group, async_op=True)


class _ReduceScatter(_Collective):
    """Sums the same part of every rank's shard of a bucket; each rank gets its own."""

    def __init__(
        self,
        own: torch.Tensor,
        parts: list[torch.Tensor],
        whole: torch.Tensor | None,
        op: Any,
        group: dist.ProcessGroup,
    ) -> None:
        """
        Args:
            own: [n], this rank's part, a view of the bucket; it receives the sum.
            parts: [n] each, views of the bucket, in rank order.
            whole: [W * n], the parts where they are adjacent in the bucket; None where they have to be copied.
        """
        self.num_bytes = len(parts) * own.nbytes
        self.gradients = own
        self._parts = parts
        self._sent = whole
        self._op = op
        self._group = group

    def _start(self) -> dist.Work:
        self._sent = self._sent if self._sent is not None else torch.cat(self._parts)
        return dist.reduce_scatter_tensor(self.gradients, self._sent, op=self._op, group=self._group, async_op=True)


@contextmanager
def _recorded(
    scheduler: CommScheduler, group: dist.ProcessGroup, async_ops: bool = False
) -> Iterator[PendingReduction]:
    """Replaces torch's coalescing manager: records the collectives inside and yields the handle to wait for."""
    assert async_ops, "gradients are reduced in micro-ops only during the backward pass"
    collectives: list[_Collective] = []
    reduction = PendingReduction(scheduler)
    cut = scheduler.micro_ops

    def all_reduce(tensor: torch.Tensor, *, op: Any, group: dist.ProcessGroup, async_op: bool) -> None:
        for start, end in cut.cut(tensor.numel(), tensor.element_size()):
            collectives.append(_AllReduce(tensor[start:end], op, group))

    def reduce_scatter(
        own: torch.Tensor, bucket: torch.Tensor, *, op: Any, group: dist.ProcessGroup, async_op: bool
    ) -> None:
        shards = bucket.chunk(group.size())
        for start, end in cut.cut(bucket.numel(), bucket.element_size(), group.size()):
            whole = bucket if end - start == own.numel() else None
            parts = [shard[start:end] for shard in shards]
            collectives.append(_ReduceScatter(own[start:end], parts, whole, op, group))

    with replaced(dist, "all_reduce", all_reduce), replaced(ddp_buffers, "dist_reduce_scatter_func", reduce_scatter):
        yield reduction
    for collective in collectives:
        collective.ready = ReadyEvent(collective.gradients)
    reduction.micro_ops.extend(collectives)
    scheduler.put(reduction)


def _collective_group(bucket_group: Any) -> dist.ProcessGroup:
    if bucket_group.ddp_config.use_distributed_optimizer:
        return bucket_group.intra_distributed_optimizer_instance_group
    return bucket_group.data_parallel_group


def _check_chunk(ddp: DistributedDataParallel, cut: MicroOps) -> None:
    """Raises a UsageError if a micro-op is smaller than the smallest parameter in the buckets that are cut."""
    smallest_bytes = min(
        (
            parameter.numel() * bucket.grad_data.element_size()
            for bucket_group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups
            if _collective_group(bucket_group).size() > 1
            for bucket in bucket_group.buckets
            for parameter in bucket.params_list
        ),
        default=0,
    )
    if cut.chunk_bytes < smallest_bytes:
        raise UsageError(
            f"--lancet-grad-chunk-mb {cut.chunk_bytes / 1e6:g} is less than the smallest parameter of the gradient "
            f"buckets, {smallest_bytes / 1e6:g} MB. Pass at least that; 30 is the default."
        )


@contextmanager
def reductions_in_micro_ops(scheduler: CommScheduler) -> Iterator[None]:
    """Inside the context DDP's gradient reductions between several ranks go through ``scheduler``.

    Raises:
        UsageError: the smallest parameter of a model is larger than a micro-op; raised when DDP wraps the model.
    """

    def init(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if self.ddp_config.overlap_grad_reduce:
            _check_chunk(self, scheduler.micro_ops)

    def start_grad_sync(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        manager = ddp_buffers._coalescing_manager
        # A single rank sends nothing. A model without overlapped reductions is not the plan's model.
        if self.ddp_config.overlap_grad_reduce and _collective_group(self).size() > 1:
            manager = functools.partial(_recorded, scheduler)
        with replaced(ddp_buffers, "_coalescing_manager", manager):
            stock(self, *args, **kwargs)

    with around(DistributedDataParallel, "__init__", init), around(_BUCKET_GROUP, "start_grad_sync", start_grad_sync):
        yield
