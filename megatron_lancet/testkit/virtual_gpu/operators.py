"""What an operator does, by its schema: which tensors it reads, which it writes, whether the host must wait."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry


class Kind(Enum):
    """How an operator runs on a GPU."""

    KERNEL = auto()
    NO_KERNEL = auto()
    """It makes a view or changes no data."""
    ALLOCATION = auto()
    """It returns memory whose content is not defined."""
    HOST_WAITS = auto()
    """The host needs a value, or the shape of the result depends on values."""


_ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
_NO_KERNELS = {
    "detach",
    "alias",
    "lift_fresh",
    "_unsafe_view",
    "_reshape_alias",
    "resize_",
    "set_",
    "_fused_sdp_choice",
}
_HOST_WAITS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}

_GATHERS = {"aten::index", "aten::index_select", "aten::gather", "aten::embedding"}


@dataclass(frozen=True)
class Accesses:
    """Tensors among an operator's arguments.

    Attributes:
        reads: tensors that it reads.
        writes: tensors that it changes.
    """

    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]

    @property
    def arguments(self) -> Sequence[torch.Tensor]:
        return (*self.reads, *self.writes)


def kind_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind:
    """How an operator with these arguments runs."""
    kind = _kind(function)
    if kind is Kind.KERNEL and _shape_depends_on_values(function, args, kwargs):
        return Kind.HOST_WAITS
    return kind


@functools.cache
def _kind(function: Any) -> Kind:
    name = base_name(function)
    if name in _ALLOCATIONS:
        return Kind.ALLOCATION
    if name in _HOST_WAITS:
        return Kind.HOST_WAITS
    schema = function._schema
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    returns_views = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
    if name in _NO_KERNELS or (returns_views and not writes):
        return Kind.NO_KERNEL
    return Kind.KERNEL


def _shape_depends_on_values(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = base_name(function)
    if name == "repeat_interleave":
        return "output_size" not in kwargs or kwargs["output_size"] is None
    if name in ("index_put", "index_put_") and args[2].numel() == 1:
        return False  # torch fills by the mask
    if name in ("index_put", "index_put_") and args[2].numel() == 1:
        return False  # ``x[mask] = number`` is a masked fill on CUDA
    if name in ("index", "index_put", "index_put_"):
        return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return False


@functools.cache
def base_name(function: Any) -> str:
    """Name without namespace and overload, for example ``mm``."""
    return str(function._schema.name.split("::")[-1])


class _Argument(NamedTuple):
    """An argument or a result of a schema, and the names of the memory that the operator changes in it.

    A list that is changed has no name.
    """

    name: str
    is_changed: bool
    memory: frozenset[str]


@functools.cache
def _arguments(function: Any) -> tuple[_Argument, ...]:
    """The arguments of a schema, which torch makes anew for each look: that takes longer than a small kernel."""
    return tuple(map(_argument, function._schema.arguments))


@functools.cache
def _returns(function: Any) -> tuple[_Argument, ...]:
    return tuple(map(_argument, function._schema.returns))


def _argument(argument: Any) -> _Argument:
    info = argument.alias_info
    is_changed = info is not None and info.is_write
    return _Argument(argument.name, is_changed, frozenset(info.before_set) if is_changed else frozenset())


def accesses_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Accesses:
    """The tensors that an operator with these arguments reads and writes, by its schema."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for argument, value in _bound(function, args, kwargs):
        (writes if argument.is_changed else reads).extend(tensors_in(value))
    return Accesses(reads, writes)


def _bound(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[_Argument, Any]]:
    arguments = _arguments(function)
    yield from zip(arguments, args, strict=False)
    for argument in arguments[len(args) :]:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def results_in_place(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Per result of the operator the argument that it is, for operators that write; None for new tensors."""
    results = []
    for result in _returns(function):
        own = None
        if result.is_changed:
            for argument, value in _bound(function, args, kwargs):
                if argument.memory & result.memory:
                    own = value
        results.append(own)
    return results


def only_result_in_place(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The argument that an operator changes and returns, if it returns nothing else.

    Such an operator changes no shape, so it need not run on the meta device. Some have no kernel there.
    """
    in_place = results_in_place(function, args, kwargs)
    return in_place[0] if len(in_place) == 1 and isinstance(in_place[0], torch.Tensor) else None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of an argument or a result, which may be lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, list | tuple | dict):
        return []
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_product(function: Any) -> bool:
    """Whether an operator multiplies matrices, attention included."""
    return getattr(function, "overloadpacket", None) in flop_registry


def cost_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> tuple[int, int]:
    """FLOP of a matrix product or of attention (0 for other operators), and bytes read and written."""
    return _flops_of(function, args, kwargs, result), _bytes_of(function, args, kwargs, result)


def _bytes_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    results = sum(map(_touched_bytes, tensors_in(result)))
    tensors = accesses_of(function, args, kwargs).arguments
    if function._schema.name in _GATHERS:  # of the first tensor only what the result shows is read
        tensors, results = tensors[1:], 2 * results
    return results + sum(map(_touched_bytes, tensors))


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of memory behind a tensor's elements; expanded dimensions show the same memory again."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0 or size == 0)
    return math.prod(sizes) * tensor.element_size()


def _flops_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    name = base_name(function)
    if name == "_grouped_mm":  # torch counts none: each row, or column, of one factor meets one group of the other
        return int(2 * args[0].size(-2) * args[0].size(-1) * args[1].size(-1))
    counter = flop_registry.get(function._overloadpacket)
    if counter is None:
        return 0
    if name in ("addmm", "addmm_"):  # whose variant with a type of the result has one more argument
        return int(counter(*args[:3], out_val=result))
    if name.startswith("_scaled_dot_product"):
        is_backward = name.endswith("_backward")
        query, key, value = args[is_backward : is_backward + 3]
        return _attention_flops(query, key, value, is_backward, _is_causal(function, args, kwargs))
    return int(counter(*args, **kwargs, out_val=result))


def _attention_flops(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_backward: bool, is_causal: bool
) -> int:
    """FLOP of attention over ``[batch, heads, positions, head dim]``, with fewer key heads than query heads or as many.

    torch's own count refuses fewer key heads before torch 2.12, and counts a causal mask as none.
    """
    batch, heads, queries, head_dim = query.shape
    keys, value_dim = key.size(2), value.size(3)
    # The backward computes the scores again, and the gradients of scores, values, queries and keys.
    widths = 3 * head_dim + 2 * value_dim if is_backward else head_dim + value_dim
    flops = 2 * batch * heads * queries * keys * widths
    if is_causal:
        flops = flops * (2 * keys - queries) // (2 * keys)  # the last query sees all keys, the first fewer
    return flops


def _is_causal(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return any(value for argument, value in _bound(function, args, kwargs) if argument.name == "is_causal")


def without_values(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The shapes of an operator's results, on the meta device; a factory's own results."""

    def on_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    if not tensors_in([args, dict(kwargs)]):
        return function(*args, **kwargs)
    own = only_result_in_place(function, args, kwargs)
    if own is not None:
        return on_meta(own)
    meta_args = pytree.tree_map(on_meta, tuple(args))
    if base_name(function) == "_grouped_mm":  # on the meta device it knows bf16 only
        factors = (factor.to(torch.bfloat16) for factor in meta_args[:2])
        return function(*factors, *meta_args[2:], **pytree.tree_map(on_meta, dict(kwargs))).to(meta_args[0].dtype)
    result = function(*meta_args, **pytree.tree_map(on_meta, dict(kwargs)))
    if base_name(function) == "native_layer_norm":
        # The kernel that will run is the CPU's, whose statistics have the input's type and not CUDA's fp32.
        return tuple(one.to(args[0].dtype) for one in result)
    return result
