"""Lets the store run the weight gradients that modules delay themselves, as Transformer Engine's do.

Transformer Engine's interface, from version 2.3 on, as far as it is used here:

- the module's backward computes dX and calls ``wgrad_store.put(tensors, function)``, first in first out;
- ``backward_dw()`` runs the oldest of these calls and leaves dW in ``.grad`` of the weight, or adds it to ``main_grad``
  where ``fuse_wgrad_accumulation`` is set (autograd then finds a placeholder for ``.grad``);
- it then calls the functions registered with ``register_wgrad_accumulation_and_reduce_hooks``;
- parameters whose gradients are delayed carry ``skip_backward_post_hook``.

``backward_dw()`` would report to DDP once per chunk, and overwrite the gradient of the previous chunk. So DDP's
functions are kept here, and each result is added to ``main_grad`` at once.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from megatron_lancet.runtime.weight_grad_store import DeferredWeight, WeightGradStore


def delays_own_weight_grad(module: torch.nn.Module) -> bool:
    """Whether ``module`` has Transformer Engine's delayed weight gradients, switched on, for weights that train."""
    own_store = getattr(module, "wgrad_store", None)
    delays = getattr(own_store, "delay_wgrad_compute", None)
    return callable(delays) and bool(delays()) and bool(_delayed_parameters(module))


def feed_from(module: torch.nn.Module, name: str, store: WeightGradStore) -> None:
    """Makes ``store`` run the weight gradients that ``module`` delays. Call before DDP wraps the model.

    Args:
        name: name of the weight gradient's op.
    """
    _Feed(module, name, store)


def _delayed_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and getattr(parameter, "skip_backward_post_hook", False)
    }


class _WeightWithPlaceholder(DeferredWeight):
    """A weight whose ``.grad`` is a placeholder: its gradient has been added to ``main_grad``."""

    def report(self) -> None:
        self._parameter.grad = None
        super().report()


class _Feed:
    """Connects a module and its own store to our store and to DDP. The module refers to it, so it lives as long."""

    def __init__(self, module: torch.nn.Module, name: str, store: WeightGradStore) -> None:
        self._module = cast(Any, module)
        self._name = name
        self._store = store
        self._waiting = _delayed_parameters(module)
        fused = bool(self._module.fuse_wgrad_accumulation)
        self._placeholders = {name for name in self._waiting if fused and "bias" not in name}
        self._parameters = dict(self._waiting)
        self._deferred: list[DeferredWeight] = []
        self._put_into_own_store = self._module.wgrad_store.put
        self._module.wgrad_store.put = self._put
        self._module.register_wgrad_accumulation_and_reduce_hooks = self._register

    def _register(self, report_ready: Callable[[], None]) -> None:
        """DDP calls this for each marked parameter, in the order of the module's parameters."""
        name = next(iter(self._waiting))
        parameter = self._waiting.pop(name)
        kind = _WeightWithPlaceholder if name in self._placeholders else DeferredWeight
        self._deferred.append(kind(parameter, f"{self._name}.{name}", report_ready))
        if len(self._deferred) > 1:
            return
        # One backward function uses all parameters of the module: the last use of one is the last use of all.
        use = parameter.expand_as(parameter).grad_fn
        assert use is not None
        self._accumulate_grad = use.next_functions[0][0]  # the hook goes with the node
        assert self._accumulate_grad is not None
        self._accumulate_grad.register_hook(lambda *_: self._mark_last_use())

    def _mark_last_use(self) -> None:
        for weight in self._deferred:
            self._store.mark_last_use(weight)

    def _put(self, tensors: Iterable[Any], function: Callable[..., Any]) -> None:
        """The module's backward calls this."""
        tensors = list(tensors)
        self._put_into_own_store(tensors, function)
        if self._deferred:
            self._store.put(self._deferred, self._run_oldest, self._num_bytes(tensors))
        else:
            self._module.backward_dw()  # no DDP, nobody to call it later

    def _run_oldest(self) -> None:
        self._module.backward_dw()
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and name not in self._placeholders:
                parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
            parameter.grad = None

    def _num_bytes(self, tensors: Iterable[Any]) -> int:
        """Bytes that ``tensors``, some of them lists, keep alive; main gradients are kept anyway."""
        total = 0
        for tensor in tensors:
            if isinstance(tensor, list | tuple):
                total += self._num_bytes(tensor)
            elif isinstance(tensor, torch.Tensor) and not self._is_main_grad(tensor):
                total += tensor.nbytes
        return total

    def _is_main_grad(self, tensor: torch.Tensor) -> bool:
        return any(tensor is getattr(parameter, "main_grad", None) for parameter in self._parameters.values())
