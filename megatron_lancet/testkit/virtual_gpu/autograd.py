"""The streams of autograd, which the engine of a CPU does not have.

On CUDA a node runs on the stream that was current when it was made. Nodes of a forward pass are made on the stream that
computes. The accumulation node of a parameter is made by DDP's constructor, on the stream that is current there, and
lives on: its hooks run on that stream. If its gradient is defined, the engine first makes this stream wait for the one
that has made the gradient; if it is undefined, it does not (``InputBuffer::add`` in torch's engine returns at once). At
the end of a backward pass, before its callbacks, the caller's stream waits for the streams of all accumulation nodes.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megatron_lancet.patching import replaced

if TYPE_CHECKING:
    from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu


class LeafStreams:
    """Streams of accumulation nodes."""

    def __init__(self, gpu: "VirtualGpu") -> None:
        self._gpu = gpu
        self._used: set[Any] = set()

    def hook(self, parameter: torch.nn.Parameter, hook: Callable[..., None]) -> Callable[..., None]:
        """A hook of the accumulation node of ``parameter``, which runs on the stream that is current now."""
        stream = self._gpu.current_stream()

        def on_own_stream(*unused: Any) -> None:
            if parameter.grad is not None:
                stream.wait_stream(self._gpu.current_stream())
                self._gpu.record_stream(parameter.grad, stream)
            self.run_on(stream, lambda: hook(*unused))

        return on_own_stream

    def run_on(self, stream: Any, hook: Callable[[], None]) -> None:
        """Runs a hook of a node of ``stream`` whose gradient is undefined."""
        self._used.add(stream)
        with self._gpu.CurrentStream(stream):
            hook()

    def join(self) -> None:
        """Makes the current stream wait for the streams of all nodes that have run."""
        for stream in self._used:
            self._gpu.current_stream().wait_stream(stream)
        self._used.clear()


class _Engine:
    """Autograd's engine; passes and callbacks begin or end behind the streams of accumulation nodes, as on CUDA."""

    def __init__(self, stock: Any, leaves: LeafStreams, gpu: "VirtualGpu") -> None:
        self._stock = stock
        self._leaves = leaves
        self._gpu = gpu
        self._thread = threading.local()

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on a thread of its own, as nodes of a CUDA device do, while the caller waits."""
        if getattr(self._thread, "is_device", False):
            return self._run_here(*args, **kwargs)
        results: list[Any] = []
        errors: list[BaseException] = []

        stream = self._gpu.current_stream()

        def run() -> None:
            self._thread.is_device = True
            try:
                with self._gpu.CurrentStream(stream), self._gpu.operators():
                    results.append(self._run_here(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
                errors.append(error)

        thread = threading.Thread(target=run, name="autograd of the virtual GPU")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def _run_here(self, *args: Any, **kwargs: Any) -> Any:
        result = self._stock.run_backward(*args, **kwargs)
        self._leaves.join()
        return result

    def queue_callback(self, callback: Callable[[], None]) -> None:
        def behind_leaves() -> None:
            self._leaves.join()
            callback()

        self._stock.queue_callback(behind_leaves)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


@contextmanager
def leaf_streams(gpu: "VirtualGpu") -> Iterator[LeafStreams]:
    """Inside the context backward passes end as on CUDA."""
    leaves = LeafStreams(gpu)
    engine = _Engine(torch.autograd.Variable._execution_engine, leaves, gpu)
    with replaced(torch.autograd.Variable, "_execution_engine", engine):
        yield leaves
