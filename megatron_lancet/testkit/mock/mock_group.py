"""A c10d process group of N ranks of which only one exists.

An all-to-all is a loopback: this rank receives from rank j what it has sent to rank j. Other collectives act as if all
ranks held the same data as this one. Every message takes the time that the group's link model gives.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from megatron_lancet.runtime.device import on_cuda
from megatron_lancet.testkit.mock.link import Link, Queue
from megatron_lancet.testkit.mock.mock_work import Clock, DeviceWork, HostWork, refuse_one_connection
from megatron_lancet.testkit.mock.paced_link import PacedLink
from megatron_lancet.testkit.mock.transfer import Transfer

BACKEND = "mock"

_KEEPS = (ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN)
"""Reductions that leave equal values as they are."""


def _unsupported(op: str) -> Callable[..., NoReturn]:
    def refuse(group: "MockProcessGroup", *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"the mock process group has no {op}: the other {group.size() - 1} ranks of the group do not exist. It "
            "knows all-to-all, all-reduce, all-gather, reduce-scatter, broadcast, gather, scatter, reduce, barrier."
        )

    return refuse


_NUM_SPLITS_SHOWN = 8

type _Splits = Sequence[int]
type _Tensors = Sequence[torch.Tensor]
# Typed as Any: c10d's stub lists the overloads that callers may use; a subclass implements one form of each.
_ProcessGroup: Any = dist.ProcessGroup


class MockProcessGroup(_ProcessGroup):
    """The mocked group. The names of its methods and the order of their arguments are c10d's.

    Messages on a device share ``link`` with all groups that have it. Messages of the host take as long, but
    share it with no other group. ``timeout`` is the maximum duration of a host's wait. Outputs are written through
    ``.data``: as on a real link, autograd does not see this as a change of the tensor.
    """

    def __init__(self, name: str, rank: int, size: int, link: PacedLink, timeout: timedelta, clock: Clock) -> None:
        super().__init__(rank, size)
        self._name = name
        self._link = link if size > 1 else PacedLink(Link())
        self._timeout = timeout
        self._clock = clock
        self._queue = Queue()
        self._stream: torch.cuda.Stream | None = None

    @property
    def group_name(self) -> Any:
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        return BACKEND

    def _get_backend(self, device: Any) -> Any:
        """The group itself, which has no parts for devices: torch 2.14's batches of sends and receives ask for one."""
        return self

    def shutdown(self) -> None:
        """Does nothing: the clock belongs to the world."""

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: _Splits, input_splits: _Splits, opts: Any = None
    ) -> dist.Work:
        """Loopback of rows: ``output`` becomes ``input``.

        Raises:
            ValueError: the sizes to receive differ from the sizes to send.
        """
        receive, send = (
            [int(rows) for rows in splits] or [len(tensor) // self.size()] * self.size()
            for splits, tensor in ((output_splits, output), (input_splits, input))
        )
        if receive != send or sum(send) != len(input) or input.shape != output.shape:
            raise ValueError(
                "the mock's all_to_all is a loopback, each rank returns what was sent to it: receive splits must equal "
                f"send splits and add up to the rows. Got {_shortened(receive)} for {list(output.shape)} "
                f"received and {_shortened(send)} for {list(input.shape)} sent. Exchange the counts by an all_to_all "
                "of the group."
            )
        num_rows_to_others = len(input) - send[self.rank()]
        row_bytes = input.element_size() * input.shape[1:].numel()
        return self._issue("all_to_all", Transfer([(output, input)]), num_rows_to_others * row_bytes, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> dist.Work:
        """Loopback of a list of tensors, one per rank."""
        if [tensor.shape for tensor in outputs] != [tensor.shape for tensor in inputs]:
            raise ValueError(
                "the mock's all_to_all is a loopback, each rank returns what was sent to it: got shapes "
                f"{[list(t.shape) for t in outputs]} to receive and {[list(t.shape) for t in inputs]} to send."
            )
        to_others = sum(tensor.nbytes for rank, tensor in enumerate(inputs) if rank != self.rank())
        return self._issue("all_to_all", Transfer([*zip(outputs, inputs, strict=True)]), to_others, opts)

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> dist.Work:
        """``tensors`` times the number of ranks (SUM), or as they are (AVG, MAX, MIN)."""
        factor = self._factor(opts, "all_reduce")
        num_bytes = 2 * (self.size() - 1) / self.size() * _bytes(tensors)
        return self._issue("all_reduce", Transfer(in_place=tensors, factor=factor), num_bytes, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: _Tensors, opts: Any = None) -> dist.Work:
        """Like all-reduce: c10d does not define the result on ranks other than the root."""
        factor = self._factor(opts, "reduce")
        return self._issue("reduce", Transfer(in_place=tensors, factor=factor), _bytes(tensors), opts)

    def broadcast(self, tensors: _Tensors, opts: Any = None) -> dist.Work:
        """``tensors`` as they are."""
        return self._issue("broadcast", Transfer(in_place=tensors), _bytes(tensors), opts)

    def allgather(self, output_lists: list[_Tensors], inputs: _Tensors, opts: Any = None) -> dist.Work:
        """A copy of each input for every rank."""
        return self._all_gather(list(zip(output_lists, inputs, strict=True)), opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """N copies of ``input`` along the first dimension of ``output``."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> dist.Work:
        """Several all-gathers as one message."""
        pairs = zip(outputs, inputs, strict=True)
        return self._all_gather([(self._parts(output), input) for output, input in pairs], opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: _Tensors, input_lists: list[_Tensors], opts: Any = None) -> dist.Work:
        """The part of this rank, times the number of ranks (SUM), or as it is (AVG, MAX, MIN)."""
        return self._reduce_scatter(list(zip(outputs, input_lists, strict=True)), opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """The slice of this rank along the first dimension of ``input``, reduced as above."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> dist.Work:
        """Several reduce-scatters as one message."""
        pairs = zip(outputs, inputs, strict=True)
        return self._reduce_scatter([(output, self._parts(input)) for output, input in pairs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, output_lists: list[_Tensors], inputs: _Tensors, opts: Any = None) -> dist.Work:
        """N copies where this rank is the root, nothing elsewhere."""
        pairs = zip(output_lists, inputs, strict=True) if output_lists else ()
        return self._all_gather(list(pairs), opts)

    def scatter(self, outputs: _Tensors, input_lists: list[_Tensors], opts: Any = None) -> dist.Work:
        """The part of this rank, where this rank is the root.

        Raises:
            ValueError: another rank is the root: its data is unknown.
        """
        if not input_lists:
            raise ValueError(f"the mock can't scatter from rank {opts.rootRank}, which does not exist.")
        parts = [parts[self.rank()] for parts in input_lists]
        num_bytes = _bytes(tensor for parts in input_lists for tensor in parts) - _bytes(parts)
        return self._issue("scatter", Transfer([*zip(outputs, parts, strict=True)]), num_bytes, opts)

    def barrier(self, opts: Any = None, **_: Any) -> dist.Work:
        """Waits for no rank, but takes the link's latency."""
        return self._issue("barrier", Transfer(), 0, opts)

    send = _unsupported("send")
    recv = _unsupported("recv")
    recv_anysource = _unsupported("recv_anysource")
    allgather_coalesced = _unsupported("allgather_coalesced")
    monitored_barrier = _unsupported("monitored_barrier")
    split_group = _unsupported("split_group")
    merge_remote_group = _unsupported("merge_remote_group")
    _start_coalescing = _unsupported("batch of sends and receives")

    def _all_gather(self, gathered: list[tuple[_Tensors, torch.Tensor]], opts: Any) -> dist.Work:
        copies = [(copy, tensor) for copies, tensor in gathered for copy in copies]
        to_others = (self.size() - 1) * _bytes(tensor for _, tensor in gathered)
        return self._issue("all_gather", Transfer(copies), to_others, opts)

    def _reduce_scatter(self, scattered: list[tuple[torch.Tensor, _Tensors]], opts: Any) -> dist.Work:
        factor = self._factor(opts, "reduce_scatter")
        copies = [(output, parts[self.rank()]) for output, parts in scattered]
        to_others = (self.size() - 1) * _bytes(part for _, part in copies)
        return self._issue("reduce_scatter", Transfer(copies, factor=factor), to_others, opts)

    def _factor(self, opts: Any, op: str) -> int:
        """The factor by which a reduction of N equal values multiplies them."""
        reduction = opts.reduceOp if opts is not None else ReduceOp.SUM
        if reduction == ReduceOp.SUM:
            return self.size()
        if any(reduction == kept for kept in _KEEPS):
            return 1
        raise NotImplementedError(f"the mock's {op} knows SUM, AVG, MAX and MIN, not {reduction}.")

    def _parts(self, tensor: torch.Tensor) -> _Tensors:
        """The slices of the ranks."""
        return list(tensor.view(-1).view(self.size(), -1).unbind())

    def _issue(self, op: str, transfer: Transfer, bytes_to_others: float, opts: Any) -> dist.Work:
        """What every collective leads to; the virtual GPU has its own in place."""
        return self._issue_on_link(op, transfer, bytes_to_others, opts)

    def _issue_on_link(self, op: str, transfer: Transfer, bytes_to_others: float, opts: Any) -> dist.Work:
        outputs = transfer.outputs
        if not outputs or not on_cuda(outputs[0]):
            duration_us = self._link.link.time_us(bytes_to_others)
            due_s = self._queue.enter(duration_us)
            return HostWork(op, transfer.deliver, outputs, due_s, self._timeout, self._clock)
        if self._stream is None:
            refuse_one_connection()
            self._stream = torch.cuda.Stream(outputs[0].device)
        group_stream = self._stream if getattr(opts, "asyncOp", True) else None

        def send() -> None:
            self._link.send(transfer, bytes_to_others)

        return DeviceWork(send, transfer.inputs, outputs, group_stream)


def _shortened(splits: Sequence[int]) -> str:
    return str(splits[:_NUM_SPLITS_SHOWN])[:-1] + (", ...]" if len(splits) > _NUM_SPLITS_SHOWN else "]")


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)
