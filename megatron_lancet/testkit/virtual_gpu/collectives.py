"""NCCL's place among streams, for the mocked process group.

A collective that is called with ``async_op=False`` is a kernel of the current stream, and nothing keeps its tensors
alive for it. One with ``async_op=True`` runs on a stream of its group behind the current one, and its tensors are kept
until the work has been waited for. (ProcessGroupNCCL of torch 2.8 and later.)
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_lancet.testkit.virtual_gpu.log import CollectiveBegins, CollectiveEnds

if TYPE_CHECKING:
    from megatron_lancet.testkit.mock.mock_group import MockProcessGroup
    from megatron_lancet.testkit.mock.transfer import Transfer
    from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu


_NO_TIMEOUT = timedelta(0)


class _Work(dist.Work):
    """A collective that has been enqueued."""

    def __init__(self, outputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], done: Any) -> None:
        """
        Args:
            kept: tensors that are kept alive until the wait.
            done: event behind the collective; None if it is on the caller's stream.
        """
        super().__init__()
        self._outputs = list(outputs)
        self._kept = list(kept)
        self._done = done

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        self._kept = []
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._outputs)
        return future


def issued_on(gpu: "VirtualGpu") -> Callable[..., dist.Work]:
    """What takes the place of ``MockProcessGroup._issue``."""
    streams: dict[str, Any] = {}

    def issue(
        group: "MockProcessGroup",
        op: str,
        transfer: "Transfer",
        bytes_to_others: float,
        opts: Any,
    ) -> dist.Work:
        gpu.refuse_in_capture(op)
        name = str(group.group_name)
        if not getattr(opts, "asyncOp", True):
            _deliver(gpu, group, name, op, transfer, bytes_to_others)
            return _Work(transfer.outputs, (), None)
        if name not in streams:
            streams[name] = gpu.Stream()
            streams[name].name = f"NCCL of group {name}"
        stream = streams[name]
        stream.wait_stream(gpu.current_stream())
        with gpu.CurrentStream(stream):
            _deliver(gpu, group, name, op, transfer, bytes_to_others)
            done = stream.record_event()
        return _Work(transfer.outputs, (*transfer.inputs, *transfer.outputs), done)

    return issue


def _deliver(
    gpu: "VirtualGpu", group: "MockProcessGroup", name: str, op: str, transfer: "Transfer", num_bytes: float
) -> None:
    stream = gpu.current_stream().id
    gpu.note(CollectiveBegins(stream, op, name, group.size(), num_bytes))
    with torch.no_grad():
        transfer.deliver()
    gpu.note(CollectiveEnds(stream))
