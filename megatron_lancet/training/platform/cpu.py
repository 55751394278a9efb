"""Makes Megatron's ``torch.cuda`` assumptions hold on a machine without a GPU.

Megatron asks ``torch.cuda`` for a device, streams, events, memory figures and random number states, and names
``device="cuda"`` in a few dozen places. Here each of these gets a CPU meaning for the length of a context:
there is one "device", work on it is finished when the call returns, and its random state is torch's own.
Nothing is patched when a GPU is present, and nothing at import. What has to change in Megatron besides is in
``training/megatron/cpu_patches.py``.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

# Dynamo collects torch functions by identity when it is first imported: import it before replacing any.
import torch._dynamo
import torch.utils.data

from megatron_lancet.patching import around, replaced

_CPU = torch.device("cpu")

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "linspace", "eye")
"""Functions that Megatron calls with ``device="cuda"`` or for pinned memory; only these pay for a look at it."""


def gpu_available() -> bool:
    """Whether this process sees a CUDA device."""
    return torch.cuda.device_count() > 0


class _Stream:
    """A stream on which everything has already happened."""

    priority_range = staticmethod(lambda: (0, 0))
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = _CPU

    def wait_stream(self, stream: "_Stream") -> None: ...

    def wait_event(self, event: "_Event") -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        return event or _Event()


class _Event:
    """An event that has already been reached."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: _Stream | None = None) -> None: ...

    def wait(self, stream: _Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


_THE_STREAM = _Stream()


@contextmanager
def _on_stream(stream: _Stream | None) -> Iterator[None]:
    yield


def _nothing() -> Callable[..., None]:
    """A stand-in for a call that only makes sense on a GPU and returns nothing.

    A new function each time: dynamo maps torch's functions by identity, and must not find one under two names.
    """
    return lambda *_, **__: None


def _zero() -> Callable[..., int]:
    """A stand-in for a memory counter."""
    return lambda *_, **__: 0


def _names_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _create_on_cpu(stock: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    if _names_cuda(kwargs.get("device")):
        kwargs["device"] = _CPU
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = False  # there is no device to copy it to
    return stock(*args, **kwargs)


def _type_as_on_gpu(stock: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.type()`` as a GPU would answer: the optimizers compare it with ``torch.cuda.*Tensor`` names."""
    answer = stock(tensor, *args, **kwargs)
    return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer


def _same() -> Callable[..., Any]:
    """A stand-in for ``.cuda()``: everything is on the only device already."""
    return lambda value, *_, **__: value


def _cuda_stand_ins() -> dict[str, Any]:
    """Replacements for names in ``torch.cuda``."""
    properties = SimpleNamespace(name="cpu", total_memory=0, major=8, minor=0, multi_processor_count=1)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: _CPU,
        "set_device": _nothing(),
        "get_device_capability": lambda *_: (8, 0),
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: "cpu",
        "Stream": _Stream,
        "Event": _Event,
        "stream": _on_stream,
        "current_stream": lambda *_: _THE_STREAM,
        "default_stream": lambda *_: _THE_STREAM,
        "set_stream": _nothing(),
        "is_current_stream_capturing": lambda: False,
        "synchronize": _nothing(),
        "empty_cache": _nothing(),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": _nothing(),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "memory_allocated": _zero(),
        "max_memory_allocated": _zero(),
        "memory_reserved": _zero(),
        "max_memory_reserved": _zero(),
        "device_memory_used": _zero(),
        "reset_peak_memory_stats": _nothing(),
        "memory_stats": lambda *_: _NoMemoryStats(),
    }


class _NoMemoryStats(dict):
    """Memory statistics of a device that has none: every counter is 0."""

    def __missing__(self, key: str) -> int:
        return 0


@contextmanager
def cpu_platform() -> Iterator[None]:
    """Lets Megatron run on the CPU inside the context; everything is restored at its end.

    Raises:
        AttributeError: torch or Megatron lost a name that is replaced here.
    """
    # Megatron decorates functions with torch.compile when it is imported, which looks torch's functions up.
    import megatron.training  # noqa: F401

    from megatron_lancet.training.megatron.cpu_patches import megatron_on_cpu

    with ExitStack() as stack:
        for name, value in _cuda_stand_ins().items():
            stack.enter_context(replaced(torch.cuda, name, value))
        stack.enter_context(replaced(torch.cuda.random, "get_rng_state", lambda *_, **__: torch.get_rng_state()))
        for name in ("range_push", "range_pop"):
            stack.enter_context(replaced(torch.cuda.nvtx, name, _nothing()))
        for name in _FACTORIES:
            stack.enter_context(around(torch, name, _create_on_cpu))
        stack.enter_context(around(torch.Tensor, "type", _type_as_on_gpu))
        stack.enter_context(replaced(torch.Tensor, "cuda", _same()))
        stack.enter_context(replaced(torch.nn.Module, "cuda", _same()))
        # DataLoader pins memory where an accelerator is available; there is none to pin for.
        stack.enter_context(replaced(torch.accelerator, "is_available", lambda: False))
        stack.enter_context(megatron_on_cpu())
        # Megatron's fused functions are compiled on first use, which needs a C++ compiler and takes long.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
