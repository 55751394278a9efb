"""A virtual GPU whose tensors have shapes and no values, for models of real size: its log is what matters.

Tensors of the GPU are on torch's meta device, tensors of the host on the CPU. Where the host needs a value of the GPU,
as token counts that are sizes of messages, it must be known. Small integer tensors therefore have *shadows*: values on
the CPU, computed along as long as every argument of an operator has them. What a router would decide is supplied by the
caller.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from megatron_lancet.patching import around, replaced
from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu
from megatron_lancet.testkit.virtual_gpu.log import Entry, HostWaits, Kernel
from megatron_lancet.testkit.virtual_gpu.memory import call_site, placed
from megatron_lancet.testkit.virtual_gpu.operators import (
    Kind,
    accesses_of,
    base_name,
    cost_of,
    kind_of,
    only_result_in_place,
    tensors_in,
)
from megatron_lancet.testkit.virtual_gpu.transfers import FACTORIES

META, CPU = torch.device("meta"), torch.device("cpu")

_MAX_SHADOW = 1 << 22
"""Elements of the largest tensor that gets a shadow."""
_MANY_SHADOWS = 4096

Supply = Callable[[str, Sequence[Any]], torch.Tensor | None]
"""Called with an operator's name and arguments; values of its result on the CPU, or None if it is not known."""


class MetaGpu(VirtualGpu):
    """A virtual GPU with tensors on the meta device: it logs, and checks nothing."""

    def __init__(self, supply: Supply) -> None:
        super().__init__()
        self.transfers: Any = _MetaTransfers(self)
        self._supply = supply
        self._shadows: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Does nothing: no memory is used again."""

    def note(self, entry: Entry) -> None:
        """Adds an entry to the log, or a kernel to the graph that is captured."""
        if self.capture is not None and isinstance(entry, Kernel):
            self.capture.note(entry)
        else:
            super().note(entry)

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, if they are known."""
        if not tensor.is_meta:
            return tensor
        found = self._shadows.get(tensor.untyped_storage()._cdata)
        return None if found is None else placed(found[1], tensor)

    def needed_values_of(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The values of a tensor that the host looks at.

        Raises:
            NotImplementedError: they are not known.
        """
        values = self.values_of(tensor)
        if values is None:
            raise NotImplementedError(
                f"{name} needs the values of a tensor {list(tensor.shape)} of {tensor.dtype}, which a model without "
                f"values does not have: {call_site()}"
            )
        return values

    def run(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        kwargs = {**kwargs, **({"pin_memory": False} if kwargs.get("pin_memory") else {})}
        tensors = tensors_in([args, kwargs])
        to_gpu = _is_meta(kwargs.get("device"))
        if not to_gpu and not any(tensor.is_meta for tensor in tensors):
            return function(*args, **kwargs)
        name, kind = base_name(function), kind_of(function, args, kwargs)
        if kind is Kind.NO_KERNEL:
            return function(*args, **kwargs)
        if name == "_local_scalar_dense":
            self.host_waits_for_stream(self.current_stream().id, name)
            return self.needed_values_of(args[0], name).item()
        if name in ("copy_", "_to_copy") and (not to_gpu and _to_host(name, args, kwargs)):
            return self._copy_to_host(function, args, kwargs)
        if kind is Kind.HOST_WAITS:
            return self._shaped_by_values(function, args, kwargs)
        own = only_result_in_place(function, args, kwargs)
        result = function(*args, **kwargs) if own is None else own
        if kind is not Kind.ALLOCATION:
            self.note(Kernel(self.current_stream().id, name, *cost_of(function, args, kwargs, result)))
        self._compute_shadows(function, args, kwargs, result)
        return result

    def run_as_one(self, function: Callable[..., torch.Tensor], args: Sequence[Any]) -> torch.Tensor:
        """Runs a function that is compiled into one kernel, which reads its arguments and writes its result."""
        start = len(self.log)
        result = function(*args)
        if self.is_watching:
            del self.log[start:]
            num_bytes = sum(tensor.nbytes for tensor in (*tensors_in(list(args)), *tensors_in(result)))
            self.note_kernel(str(getattr(function, "__name__", "compiled")), num_bytes)
        return result

    def note_kernel(self, name: str, num_bytes: int) -> None:
        """Adds a kernel without matrix products to the log, on the current stream."""
        self.note(Kernel(self.current_stream().id, name, 0, num_bytes))

    def _copy_to_host(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        source = args[1] if base_name(function) == "copy_" else args[0]
        values = self.needed_values_of(source, "a copy to the host")
        stream = self.current_stream().id
        self.note(Kernel(stream, base_name(function), 0, source.nbytes))
        result: torch.Tensor = function(*[values if one is source else one for one in args], **kwargs)
        if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
            self.host_waits_for_stream(stream, "copy to the host")
        return result.clone() if result is values else result

    def _shaped_by_values(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An operator whose result's shape depends on values."""
        name, stream = base_name(function), self.current_stream().id
        own_args, own_kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: self.needed_values_of(tensor, name), (tuple(args), dict(kwargs))
        )
        self.note(HostWaits(None, stream, name, call_site()))
        values = function(*own_args, **own_kwargs)
        if not isinstance(values, torch.Tensor):
            return values
        result = torch.empty_like(values, device=META)
        self.note(Kernel(stream, name, *cost_of(function, args, kwargs, result)))
        self._set_shadow(result, values)
        return result

    def _compute_shadows(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        results = [tensor for tensor in tensors_in(result) if tensor.is_meta]
        if not any(_may_have_shadow(tensor) for tensor in results):
            return
        supplied = self._supply(base_name(function), args)
        if supplied is not None:
            self._set_shadow(results[0], supplied)
            return
        known = {id(tensor): self.values_of(tensor) for tensor in tensors_in([args, dict(kwargs)])}
        if any(values is None for values in known.values()):
            for tensor in accesses_of(function, args, kwargs).writes:
                self._shadows.pop(tensor.untyped_storage()._cdata, None)
            return

        def on_host(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return known[id(value)]
            return CPU if _is_meta(value) else value

        own_args, own_kwargs = pytree.tree_map(on_host, (tuple(args), dict(kwargs)))
        for tensor, values in zip(results, tensors_in(function(*own_args, **own_kwargs)), strict=True):
            if _may_have_shadow(tensor):
                self._set_shadow(tensor, values)

    def _set_shadow(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        if len(self._shadows) > _MANY_SHADOWS:
            self._shadows = {key: found for key, found in self._shadows.items() if not found[0].expired()}
        storage = tensor.untyped_storage()
        if values.stride() != tensor.stride() or values.untyped_storage().nbytes() != storage.nbytes():
            content = torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            values = placed(content, tensor).copy_(values)
        self._shadows[storage._cdata] = (StorageWeakRef(storage), values.untyped_storage())


def _may_have_shadow(tensor: torch.Tensor) -> bool:
    return not tensor.dtype.is_floating_point and tensor.numel() <= _MAX_SHADOW


def _is_meta(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "meta"


def _to_host(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy goes from the GPU to the host."""
    if name == "copy_":
        return args[1].is_meta and not args[0].is_meta
    device = kwargs.get("device")
    return args[0].is_meta and device is not None and torch.device(device).type == "cpu"


class _MetaTransfers:
    """Says where new tensors are made, and what the host sees of the GPU's tensors."""

    creates_on_host = False

    def __init__(self, gpu: MetaGpu) -> None:
        self._gpu = gpu

    @contextmanager
    def explicit(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in FACTORIES:
                stack.enter_context(around(torch, name, _create))
            for name in ("tolist", "numpy", "cpu"):
                stack.enter_context(around(torch.Tensor, name, self._look(name)))
            stack.enter_context(around(torch.Tensor, "to", _to))
            stack.enter_context(replaced(torch.Tensor, "cuda", _to_gpu))
            stack.enter_context(replaced(torch.nn.Module, "cuda", _module_to_gpu))
            stack.enter_context(replaced(torch.cuda, "current_device", lambda: META))
            yield

    def _look(self, name: str) -> Callable[..., Any]:
        def look(stock: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not tensor.is_meta:
                return stock(tensor, *args, **kwargs)
            self._gpu.host_waits_for_stream(self._gpu.current_stream().id, name)
            return stock(self._gpu.needed_values_of(tensor, name), *args, **kwargs)

        return look


def _on_meta(device: Any) -> Any:
    return META if isinstance(device, str | torch.device) and str(device).startswith("cuda") else device


def _create(stock: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    if "device" in kwargs:
        kwargs["device"] = _on_meta(kwargs["device"])
    return stock(*args, **kwargs)


def _to(stock: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if "device" in kwargs:
        kwargs["device"] = _on_meta(kwargs["device"])
    moved: torch.Tensor = stock(tensor, *map(_on_meta, args), **kwargs)
    return moved


def _to_gpu(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor.to(META)


def _module_to_gpu(module: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
    """Moves what Megatron makes on the host; unlike torch's own, it keeps the attributes of parameters."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and not parameter.is_meta:
                moved = torch.nn.Parameter(parameter.detach().to(META), parameter.requires_grad)
                moved.__dict__.update(parameter.__dict__)
                owner._parameters[name] = moved
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(META)
    return module
