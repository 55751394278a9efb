"""Stand-ins for ``torch.cuda.CUDAGraph`` and ``torch.cuda.graph``.

In a capture no kernel runs: each is recorded with the memory that it reads and writes, by address. A replay runs them
again on the same addresses. As in CUDA, a capture raises an error if the host waits, reads a value or queries an event,
if a kernel reads host memory or draws from a generator that the graph does not know, if a thread runs its first
product, for which a library makes a handle, or if a stream outside waits for one inside, or the reverse. Collectives
are not modelled, and raise one too.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from megatron_lancet.testkit.virtual_gpu.graphs.pool import VirtualPool
from megatron_lancet.testkit.virtual_gpu.log import GraphLaunched, Kernel
from megatron_lancet.testkit.virtual_gpu.memory import Allocation, call_site, span
from megatron_lancet.testkit.virtual_gpu.operators import Kind, accesses_of, base_name, cost_of, is_product, tensors_in

if TYPE_CHECKING:
    from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu
    from megatron_lancet.testkit.virtual_gpu.streams import VirtualStream

type Bytes = tuple[Allocation, int, int]
"""Bytes of an allocation, from a first one to an end."""


class CaptureError(RuntimeError):
    """What CUDA does not permit while a stream is being captured."""


@dataclass(frozen=True)
class CapturedKernel:
    """A kernel of a graph.

    Attributes:
        cost: FLOP, and bytes read and written.
        run: runs it on the memory that was captured.
    """

    name: str
    site: str
    cost: tuple[int, int]
    reads: Sequence[Bytes]
    writes: Sequence[Bytes]
    run: Callable[[], None]


class VirtualGraph:
    """A graph of a :class:`VirtualGpu`.

    Attributes:
        kernels: what a replay runs, in order.
        generators: addresses of the random states that its kernels may draw from.
    """

    gpu: ClassVar["VirtualGpu"]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.kernels: list[CapturedKernel] = []
        self.generators: set[int] = set()

    def register_generator_state(self, state: Any) -> None:
        """Lets kernels of a later capture draw from a random state."""
        self.generators.add(state._cdata)

    def replay(self) -> None:
        """Enqueues all kernels on the current stream by one launch."""
        gpu = self.gpu
        gpu.refuse_in_capture("a replay")
        gpu.memory.take_freed()
        stream = gpu.current_stream().id
        gpu.note(GraphLaunched(stream, len(self.kernels)))
        for kernel in self.kernels:
            gpu.note(Kernel(stream, kernel.name, *kernel.cost))
            gpu.queues.add(stream, kernel.run)
            number = gpu.order.add_kernel(stream)
            for is_write, accessed in ((False, kernel.reads), (True, kernel.writes)):
                for allocation, start, end in accessed if gpu.is_watching else ():
                    access = start, end, stream, number, kernel.name, kernel.site
                    gpu.memory.access_bytes(allocation, is_write, *access)

    def reset(self) -> None:
        """Frees the graph."""
        self.kernels = []


class CurrentCapture:
    """Context that captures what this thread, and autograd for it, enqueue on a stream, as ``torch.cuda.graph``."""

    gpu: ClassVar["VirtualGpu"]

    def __init__(
        self,
        cuda_graph: VirtualGraph,
        pool: VirtualPool | None = None,
        stream: Any = None,
        capture_error_mode: str = "",
    ) -> None:
        self._graph = cuda_graph
        self._pool = pool or VirtualPool(self.gpu.memory)
        self._stream = stream or self.gpu.Stream()

    def __enter__(self) -> None:
        self.gpu.synchronize()
        self._stack = ExitStack()
        self._current = self.gpu.CurrentStream(self._stream)
        self._current.__enter__()
        self._stack.callback(setattr, self.gpu, "capture", None)
        self.gpu.capture = Capture(self.gpu, self._graph, self._pool, self._stream)
        if not self.gpu.is_watching:
            self._stack.enter_context(self.gpu.operators())

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """
        Raises:
            CaptureError: the capture has failed. As in torch, this error hides its reason, and the stream stays.
        """
        self._stack.close()
        if kind is not None and issubclass(kind, CaptureError):
            raise CaptureError("operation failed due to a previous error during capture")
        self._current.__exit__(None, None, None)


class Capture:
    """A capture that is under way.

    Attributes:
        pool: memory of what it allocates.
        events: numbers of the events that it has recorded.
    """

    def __init__(self, gpu: "VirtualGpu", graph: VirtualGraph, pool: VirtualPool, stream: "VirtualStream") -> None:
        self.pool = pool
        self.events: set[int] = set()
        self._gpu, self._graph, self._stream = gpu, graph, stream
        self._thread = threading.get_ident()

    def is_on(self, stream: int) -> bool:
        """Whether it captures a stream."""
        return stream == self._stream.id

    def add(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: Kind) -> Any:
        """Adds a kernel; returns its results, whose content is not defined before a replay."""
        name, site, memory = base_name(function), call_site(), self._gpu.memory
        accesses = accesses_of(function, args, kwargs)
        if kind is Kind.HOST_WAITS or any(memory.is_host(tensor) for tensor in accesses.arguments):
            raise CaptureError(f"{name} makes the host wait, or reads its memory, while a stream is captured: {site}")
        state = kwargs.get("generator")
        if state is not None and state._cdata not in self._graph.generators:
            raise CaptureError(f"{name} draws from a random state that the graph does not know: {site}")
        is_own_thread = threading.get_ident() == self._thread  # autograd's has run products before
        if is_own_thread and is_product(function) and not self._gpu.has_handle:
            raise CaptureError(f"{name} is the first product of this thread, while a stream is captured: {site}")
        result, run = self._gpu.delayed(function, args, kwargs, self._stream.id)
        changed = {id(tensor) for tensor in accesses.writes}
        writes = *accesses.writes, *(one for one in tensors_in(result) if id(one) not in changed)
        cost = cost_of(function, args, kwargs, result)
        reads = self._bytes_of(accesses.reads)
        self._graph.kernels.append(CapturedKernel(name, site, cost, reads, self._bytes_of(writes), run))
        return result

    def allocated(self, tensor: torch.Tensor) -> None:
        """Adds the kernel that fills new memory in torch's deterministic mode."""
        fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        if fills and torch.are_deterministic_algorithms_enabled() and tensor.is_floating_point():
            self.add(torch.ops.aten.fill_.Scalar, (tensor, math.nan), {}, Kind.KERNEL)

    def note(self, kernel: Kernel) -> None:
        """Adds a kernel without values."""
        cost = kernel.flops, kernel.num_bytes
        self._graph.kernels.append(CapturedKernel(kernel.name, call_site(), cost, (), (), lambda: None))

    def _bytes_of(self, tensors: Sequence[Any]) -> list[Bytes]:
        found = ((self._gpu.memory.allocation_of(tensor), span(tensor)) for tensor in tensors)
        return [(allocation, *covered) for allocation, covered in found if covered is not None]
