"""A GPU that does not exist: tensors are the host's, kernels run on the CPU, and the order is what is checked.

Inside :func:`virtual_gpu` the names that the program uses of ``torch.cuda`` lead to a :class:`VirtualGpu`, and
``runtime/device.py`` says that every tensor is on it. Inside ``watch()`` each operator is a kernel on the current
stream: its reads and writes come from its schema, and it is logged. Numbers stay right, unless an order is missing and
a stream is made late. ``testkit/virtual_gpu/megatron.py`` runs Megatron on it.

Not seen: the time that anything takes, NCCL's protocol, what the driver does by itself, what kernels do inside. Streams
of autograd are emulated (``autograd.py``).
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron_lancet.patching import around, replaced
from megatron_lancet.runtime import device
from megatron_lancet.testkit.mock import mock_group
from megatron_lancet.testkit.virtual_gpu import collectives
from megatron_lancet.testkit.virtual_gpu.graphs.graph import Capture, CaptureError, CurrentCapture, VirtualGraph
from megatron_lancet.testkit.virtual_gpu.graphs.pool import VirtualPool
from megatron_lancet.testkit.virtual_gpu.kernels import kernels_of_cuda
from megatron_lancet.testkit.virtual_gpu.log import Entry, HostWaits, Kernel, Recorded, StreamWaits
from megatron_lancet.testkit.virtual_gpu.memory import Allocation, Memory, Problem, call_site, placed
from megatron_lancet.testkit.virtual_gpu.operators import (
    Kind,
    accesses_of,
    base_name,
    cost_of,
    is_product,
    kind_of,
    results_in_place,
    tensors_in,
    without_values,
)
from megatron_lancet.testkit.virtual_gpu.order import HOST, Order
from megatron_lancet.testkit.virtual_gpu.queues import Queues
from megatron_lancet.testkit.virtual_gpu.streams import CurrentStream, VirtualEvent, VirtualStream
from megatron_lancet.testkit.virtual_gpu.transfers import Transfers


class VirtualGpu:
    """Streams, memory and log of a GPU that does not exist.

    Attributes:
        Stream, Event, CurrentStream, Graph, CurrentCapture: stand-ins for the classes of ``torch.cuda``, bound to this
            GPU.
        order: what happens before what.
        memory: memory in use, and the problems that were found.
        queues: what was enqueued and has not run.
        log: what was enqueued, in the host's order.
        default: the stream on which a program computes.
        capture: the capture of a graph that is under way; None outside of one.
    """

    def __init__(self) -> None:
        self.Stream: Any = type("Stream", (VirtualStream,), {"gpu": self})
        self.Event: Any = type("Event", (VirtualEvent,), {"gpu": self})
        self.CurrentStream: Any = type("CurrentStream", (CurrentStream,), {"gpu": self})
        self.Graph: Any = type("Graph", (VirtualGraph,), {"gpu": self})
        self.CurrentCapture: Any = type("CurrentCapture", (CurrentCapture,), {"gpu": self})
        self.capture: Capture | None = None
        self.order = Order()
        self.memory = Memory(self.order, self.stream_name, self._poison)
        self.queues = Queues()
        self.log: list[Entry] = []
        self._streams: list[VirtualStream] = []
        self.transfers = Transfers(self)
        self._thread = threading.local()
        self._is_watching = False
        self.default = self.Stream()
        self.default.name = "compute"

    @property
    def problems(self) -> Sequence[Problem]:
        """Orders that are missing, each once."""
        return self.memory.problems

    @property
    def streams(self) -> Sequence[VirtualStream]:
        """All streams, by their ids."""
        return self._streams

    @property
    def is_watching(self) -> bool:
        """Whether operators are kernels of this GPU."""
        return self._is_watching

    @property
    def host_waits(self) -> list[HostWaits]:
        """The host's waits for this GPU."""
        return [entry for entry in self.log if isinstance(entry, HostWaits)]

    def stream_name(self, stream: int) -> str:
        """Name for messages."""
        return "the host" if stream == HOST else self._streams[stream].name

    @property
    def has_handle(self) -> bool:
        """Whether this thread has run a product; True if the GPU is not watched, because it sees none then."""
        return not self._is_watching or getattr(self._thread, "has_handle", False)

    def add_stream(self, stream: VirtualStream) -> int:
        """Adds a stream; returns its id."""
        self._streams.append(stream)
        self.order.add_stream(len(self._streams) - 1)
        return len(self._streams) - 1

    def current_stream(self, *_: Any) -> VirtualStream:
        """The current stream of this thread."""
        return getattr(self._thread, "stream", self.default)

    def set_current_stream(self, stream: VirtualStream) -> None:
        """Sets the current stream of this thread."""
        self._thread.stream = stream

    def record(self, event: int, stream: int) -> None:
        """Records an event on a stream."""
        if self.capture is not None and self.capture.is_on(stream):
            self.capture.events.add(event)
            return
        self.memory.take_freed()
        self.order.record(event, stream)
        self.queues.record(stream, event)
        self.note(Recorded(stream, event))

    def stream_waits(self, stream: int, event: int) -> None:
        """Makes a stream wait for an event."""
        if self.capture is not None and (self.capture.is_on(stream) or event in self.capture.events):
            raise CaptureError(f"a stream waits for an event outside of its capture: {call_site()}")
        self.memory.take_freed()
        self.order.wait(stream, event)
        self.queues.wait(stream, event)
        self.note(StreamWaits(stream, event))

    def host_waits_for_event(self, event: int) -> None:
        """Makes the host wait for an event."""
        self.refuse_in_capture("a wait for an event")
        self.memory.take_freed()
        self.order.host_waits_for_event(event)
        self.queues.run_until(event)
        self.note(HostWaits(event, None, "event", call_site()))

    def host_sees(self, event: int) -> bool:
        """Whether an event has been reached, which the host then knows."""
        self.refuse_in_capture("a look at an event")
        is_reached = self.queues.is_reached(event)
        if is_reached:
            self.order.host_waits_for_event(event)
        return is_reached

    def host_reads(self, tensor: torch.Tensor, reason: str) -> None:
        """Notes that the host reads a tensor."""
        self.memory.access(tensor, HOST, self.order.add_kernel(HOST), False, reason, call_site())

    def host_waits_for_stream(self, stream: int, reason: str) -> None:
        """Makes the host wait for all that a stream has got so far."""
        self.refuse_in_capture("a wait for a stream")
        self.memory.take_freed()
        self.order.host_waits_for_stream(stream)
        self.queues.run_stream(stream)
        self.note(HostWaits(None, stream, reason, call_site()))

    def synchronize(self, *_: Any) -> None:
        """Makes the host wait for everything."""
        self.refuse_in_capture("a wait for the device")
        self.memory.take_freed()
        self.order.host_waits_for_all()
        self.queues.run_all()
        self.note(HostWaits(None, None, "device", call_site()))

    def refuse_in_capture(self, what: str) -> None:
        """
        Raises:
            CaptureError: a graph is being captured.
        """
        if self.capture is not None:
            raise CaptureError(f"{what} is not permitted while a stream is captured: {call_site()}")

    def set_random_state(self, stock: Callable[[torch.Tensor], None], state: torch.Tensor) -> None:
        """Sets the random state of the CPU, which stands for the GPU's."""
        self.refuse_in_capture("a change of random states")
        stock(state)

    def record_stream(self, tensor: torch.Tensor, stream: VirtualStream) -> None:
        """As ``Tensor.record_stream``: memory is not used again before ``stream`` has passed this use."""
        self.memory.allocation_of(tensor).recorded.add(stream.id)

    def note(self, entry: Entry) -> None:
        """Adds an entry to the log of what is watched."""
        if self._is_watching:
            self.log.append(entry)

    @contextmanager
    def watch(self, late: Iterable[VirtualStream] = ()) -> Iterator[None]:
        """Inside the context operators are kernels of this GPU; at its end all have run, and memory is checked.

        Args:
            late: streams that run as late as the order permits.
        """
        self.synchronize()
        self.memory.take_freed()
        self.log.clear()
        self.queues.delay(stream.id for stream in late)
        self._is_watching = True
        try:
            with self.operators():
                yield
            self.memory.take_freed()
            self.queues.delay(())
        finally:
            self._is_watching = False

    @contextmanager
    def operators(self) -> Iterator[None]:
        """Inside the context operators of this thread are kernels, if the GPU is being watched, or captured."""
        with _Watch(self) if self._is_watching or self.capture is not None else nullcontext():
            yield

    def run(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operator as this GPU would: called for each operator of the program."""
        self.memory.take_freed()
        kind = kind_of(function, args, kwargs)
        if kind is Kind.NO_KERNEL:
            return function(*args, **kwargs)
        accesses = accesses_of(function, args, kwargs)
        is_host = all(self.memory.is_host(tensor) for tensor in accesses.arguments)
        if not accesses.arguments:
            is_host = self.transfers.creates_on_host
        stream = HOST if is_host else self.current_stream().id
        name, site = base_name(function), call_site()
        if kind is Kind.ALLOCATION:
            made = self._placed(function(*args, **kwargs), self.current_stream().id, is_host, with_content=False)
            if self.capture is not None and not is_host and self.capture.is_on(stream):
                self.capture.allocated(made)
            return made
        if self.capture is not None and self.capture.is_on(stream):
            return self.capture.add(function, args, kwargs, kind)
        if not is_host and is_product(function):
            self._thread.has_handle = True
        if kind is Kind.HOST_WAITS and not is_host:
            self.host_waits_for_stream(stream, name)
        number = self.order.add_kernel(stream)
        result = self._enqueued(function, args, kwargs, stream, kind)
        if not is_host:
            self.note(Kernel(stream, name, *cost_of(function, args, kwargs, result)))
        for tensor in accesses.reads:
            self.memory.access(tensor, stream, number, False, name, site)
        changed = {id(tensor) for tensor in accesses.writes}
        for tensor in (*accesses.writes, *(one for one in tensors_in(result) if id(one) not in changed)):
            self.memory.access(tensor, stream, number, True, name, site)
        return result

    def _enqueued(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], stream: int, kind: Kind) -> Any:
        """Runs a kernel, or enqueues it on a late stream; returns its results."""
        in_place = results_in_place(function, args, kwargs)
        is_host = stream == HOST
        if is_host or kind is Kind.HOST_WAITS or not self.queues.is_late(stream):
            result = function(*args, **kwargs)
            return self._results(in_place, result, stream, is_host, with_content=True)
        result, run = self.delayed(function, args, kwargs, stream)
        self.queues.add(stream, run)
        return result

    def delayed(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], stream: int
    ) -> tuple[Any, Callable[[], None]]:
        """The results of a kernel that has not run, and what runs it on the memory that it has now."""
        in_place = results_in_place(function, args, kwargs)
        shapes = without_values(function, args, kwargs)
        result = self._results(in_place, shapes, stream, is_host=False, with_content=False)
        own_args, own_kwargs = pytree.tree_map_only(torch.Tensor, self.memory.alias, (tuple(args), dict(kwargs)))
        targets = [self.memory.alias(tensor) for tensor in tensors_in(result)]

        def run() -> None:
            with _disable_current_modes(), torch.no_grad():  # perhaps in the middle of an operator, perhaps not
                for target, value in zip(targets, tensors_in(function(*own_args, **own_kwargs)), strict=True):
                    if value.data_ptr() != target.data_ptr():
                        target.copy_(value)

        return result, run

    def _results(self, in_place: list[Any], result: Any, stream: int, is_host: bool, with_content: bool) -> Any:
        """The results of an operator: the program's own tensors where it changes them, else in memory of this GPU."""
        if len(in_place) == 1:
            own = in_place[0]
            return own if own is not None else self._placed(result, stream, is_host, with_content)
        if not in_place:
            return result
        return tuple(
            own if own is not None else self._placed(one, stream, is_host, with_content)
            for own, one in zip(in_place, result, strict=True)
        )

    def _placed(self, result: Any, stream: int, is_host: bool, with_content: bool) -> Any:
        """New tensors in memory of this GPU."""
        storages: dict[int, torch.UntypedStorage] = {}

        def place(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel() == 0:
                return tensor.new_empty(tensor.shape, device="cpu") if tensor.device.type == "meta" else tensor
            old = tensor.untyped_storage()
            if old._cdata not in storages:
                new = storages[old._cdata] = self._new(old.nbytes(), stream, is_host)
                if with_content:
                    new.copy_(old)
            return placed(storages[old._cdata], tensor)

        if isinstance(result, torch.Tensor):  # most results: a tree takes longer
            return place(result)
        return pytree.tree_map_only(torch.Tensor, place, result)

    def _new(self, num_bytes: int, stream: int, is_host: bool) -> torch.UntypedStorage:
        if self.capture is not None and not is_host and self.capture.is_on(stream):
            return self.capture.pool.new(num_bytes)
        return self.memory.new(num_bytes, max(stream, 0), is_host)

    def _poison(self, allocation: Allocation) -> None:
        """Makes freed memory undefined behind the work of its stream, and of those that it was recorded on."""
        assert allocation.stream is not None
        assert allocation.data is not None
        data = allocation.data
        for other in allocation.recorded:
            event = self.Event()
            event.number = next(self.Event._numbers)
            self.queues.record(other, event.number)
            self.queues.wait(allocation.stream, event.number)
        self.queues.add(allocation.stream, lambda: data.fill(0xFF))


class _Watch(TorchDispatchMode):
    def __init__(self, gpu: VirtualGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._gpu.run(func, args, kwargs or {})


def _plain_new(subclass: Any, *_: Any) -> torch.Tensor:
    """Makes an empty tensor of a subclass, which torch can't while operators are watched."""
    with _disable_current_modes():
        made: torch.Tensor = torch.Tensor.__new__(subclass)
    return made


@contextmanager
def virtual_gpu(gpu: VirtualGpu | None = None) -> Iterator[VirtualGpu]:
    """Inside the context ``torch.cuda`` is a virtual GPU. Enter it inside ``cpu_platform()``.

    Args:
        gpu: the GPU; None for a new one.
    """
    gpu = gpu or VirtualGpu()
    names: dict[str, Any] = {
        "Stream": gpu.Stream,
        "Event": gpu.Event,
        "stream": gpu.CurrentStream,
        "set_stream": gpu.set_current_stream,
        "current_stream": gpu.current_stream,
        "default_stream": lambda *_: gpu.default,
        "synchronize": gpu.synchronize,
        "device": lambda *_: nullcontext(),  # it has one
        "CUDAGraph": gpu.Graph,
        "graph": gpu.CurrentCapture,
        "graph_pool_handle": lambda: VirtualPool(gpu.memory),
    }
    with ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(replaced(torch.cuda, name, value))
        stack.enter_context(gpu.transfers.explicit())
        stack.enter_context(kernels_of_cuda())
        stack.enter_context(around(torch, "set_rng_state", gpu.set_random_state))
        stack.enter_context(replaced(CausalBias, "__new__", _plain_new))
        stack.enter_context(replaced(torch.Tensor, "record_stream", lambda *args: gpu.record_stream(*args)))
        stack.enter_context(replaced(device, "_is_cuda", lambda device: True))
        stack.enter_context(replaced(mock_group.MockProcessGroup, "_issue", collectives.issued_on(gpu)))
        yield gpu
