"""Makes Megatron's ``torch.cuda`` assumptions hold on a machine without a GPU.

Megatron asks ``torch.cuda`` for a device, streams, events, memory figures and random number states, and names
``device="cuda"`` in a few dozen places. Here each of these gets a CPU meaning for the length of a context:
there is one "device", work on it is finished when the call returns, and its random state is torch's own.
Nothing is patched when a GPU is present, and nothing at import. The changes to Megatron itself are in
``training/megatron/cpu_patches.py``.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

# Dynamo collects torch functions by identity when it is first imported: import it before replacing any.
import torch._dynamo
import torch.utils.data

from megatron_lancet.patching import around, replaced

_CPU = torch.device("cpu")

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "linspace", "eye")
"""Functions that Megatron calls with ``device="cuda"`` or for pinned memory; only these are wrapped."""


def gpu_available() -> bool:
    """Whether this process sees a CUDA device."""
    return torch.cuda.device_count() > 0


class _Stream:
    """A stream on which all work is already done."""

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


def _create_on_cpu(stock: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    device = kwargs.get("device")
    if isinstance(device, str | torch.device) and str(device).startswith("cuda"):
        kwargs["device"] = _CPU
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = False  # there is no device to copy to
    return stock(*args, **kwargs)


def _type_as_on_gpu(stock: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.type()`` as a GPU would answer: the optimizers compare it with ``torch.cuda.*Tensor`` names."""
    answer = stock(tensor, *args, **kwargs)
    if not isinstance(answer, str) or answer.startswith("torch.cuda."):  # a subclass calls this function twice
        return answer
    return answer.replace("torch.", "torch.cuda.", 1)


_RETURN_NOTHING = ("set_device", "set_stream", "synchronize", "empty_cache", "manual_seed_all")
_RETURN_ZERO = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def _constant(value: Any) -> Callable[..., Any]:
    """A stand-in for a function that returns ``value``.

    A new function each time: dynamo maps torch's functions by identity, and must not find one under two names.
    """
    return lambda *_, **__: value


def _cuda_stand_ins() -> dict[str, Any]:
    """Replacements for names in ``torch.cuda``."""
    properties = SimpleNamespace(name="cpu", total_memory=0, major=8, minor=0, multi_processor_count=1)
    constants = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": _CPU,
        "get_device_capability": (8, 0),
        "get_device_properties": properties,
        "get_device_name": "cpu",
        "current_stream": _THE_STREAM,
        "default_stream": _THE_STREAM,
        "is_current_stream_capturing": False,
        "memory_stats": _NoMemoryStats(),
        "device_memory_used": 0,
        **dict.fromkeys(_RETURN_NOTHING),
        "reset_peak_memory_stats": None,
        **dict.fromkeys(_RETURN_ZERO, 0),
    }
    return {
        **{name: _constant(value) for name, value in constants.items()},
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: nullcontext(),
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }


class _NoMemoryStats(dict):
    """Memory statistics of a device that has none: every counter is 0."""

    def __missing__(self, key: str) -> int:
        return 0


@contextmanager
def cpu_platform() -> Iterator[None]:
    """Makes Megatron run on the CPU inside the context; everything is restored at its end.

    Raises:
        AttributeError: torch or Megatron lacks a name that is replaced here.
    """
    # Megatron decorates functions with torch.compile when it is imported, which looks torch's functions up.
    import megatron.training  # noqa: F401

    from megatron_lancet.training.megatron.cpu_patches import megatron_on_cpu

    with ExitStack() as stack:
        for name, value in _cuda_stand_ins().items():
            stack.enter_context(replaced(torch.cuda, name, value))
        stack.enter_context(replaced(torch.cuda.random, "get_rng_state", lambda *_, **__: torch.get_rng_state()))
        for name in ("range_push", "range_pop"):
            stack.enter_context(replaced(torch.cuda.nvtx, name, _constant(None)))
        for name in _FACTORIES:
            stack.enter_context(around(torch, name, _create_on_cpu))
        stack.enter_context(around(torch.Tensor, "type", _type_as_on_gpu))
        stack.enter_context(replaced(torch.Tensor, "cuda", lambda value, *_, **__: value))
        # It marks the streams that still use a tensor; a CPU's allocator has no streams.
        stack.enter_context(replaced(torch.Tensor, "record_stream", _constant(None)))
        stack.enter_context(replaced(torch.nn.Module, "cuda", lambda value, *_, **__: value))
        # DataLoader pins memory where an accelerator is available; none is.
        stack.enter_context(replaced(torch.accelerator, "is_available", lambda: False))
        stack.enter_context(megatron_on_cpu())
        # Megatron's fused functions are compiled on first use, which needs a C++ compiler and takes long.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
