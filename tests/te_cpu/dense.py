"""Checks for kernels that read memory by address: their tensors must be dense and of the expected type.

Most functions of the extension pass ``data_ptr()`` and sizes to their kernels, but no strides. A tensor with gaps then
gives wrong numbers without an error, while the plain torch of a stand-in would use its strides.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_lancet.patching import around

_BUFFERS = (
    *("_data", "_transpose", "_scale_inv"),
    *("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv"),
)
"""Attributes of a quantized tensor that a kernel reads by address."""


class NotDenseError(AssertionError):
    """A kernel would read a tensor as dense, but it is not."""


def dense(*parameters: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks parameters that a stand-in's C++ reads or writes by address alone, and checks each call.

    A parameter may be a tensor, a quantized tensor, a list of them at any depth, or None.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(function).parameters)
        places = {name: names.index(name) for name in parameters}

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name, place in places.items():
                value = args[place] if place < len(args) else kwargs.get(name)
                if value is not None:
                    check_dense(function.__name__, name, value)
            return function(*args, **kwargs)

        vars(checked)["dense_parameters"] = parameters
        return checked

    return decorate


def check_dense(function: str, parameter: str, value: Any) -> None:
    """
    Raises:
        NotDenseError: a tensor of the value has gaps, or its dimensions are in another order.
    """
    for tensor in buffers(value):
        if not tensor.is_contiguous():
            raise NotDenseError(
                f"{function} reads {parameter} by its address, without strides: the tensor of shape "
                f"{list(tensor.shape)} has strides {list(tensor.stride())}"
            )


def buffers(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a value that a kernel reads by address."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from buffers(item)
    elif hasattr(value, "_quantizer"):
        yield from (vars(value)[name] for name in _BUFFERS if isinstance(vars(value).get(name), torch.Tensor))
    elif isinstance(value, torch.Tensor):
        yield value


@contextmanager
def dense_gating_gradients() -> Iterator[None]:
    """Gives stock's gating a contiguous gradient where Transformer Engine's GEMM reads it by address.

    With sinkhorn, Megatron 0.19.2 passes a transposed gradient, which gives wrong numbers on a device: no reference.
    """
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    def gating(stock, router, input):
        logits = stock(router, input)
        if logits.requires_grad and moe_utils.te_general_gemm is not None:
            logits.register_hook(torch.Tensor.contiguous)
        return logits

    with around(TopKRouter, "gating", gating):
        yield
