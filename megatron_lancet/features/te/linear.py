"""Transformer Engine's linear modules, called once per chunk instead of once per micro-batch.

Two of their habits give wrong gradients with chunks:

- The first call of a step quantizes the weight, and lets the dW of that call *overwrite* ``main_grad``: a module adds
  to it only where ``fuse_wgrad_accumulation and not is_first_microbatch``. Chunks come back in reverse order, so the
  first chunk's dW would overwrite the dWs of all others. Here no call is the first. The quantized weights are dropped
  instead, so that the next call makes them again, and all dWs are added, to the zeros that DDP has written.
- A grouped linear that defers dW without fusion hands autograd the buffers that dW *will be* written to. No bound
  counts this memory, and autograd copies and adds its undefined content. If dW runs at once, autograd finds it in
  ``.grad``, and DDP adds it a second time. Here dW makes the buffers when it runs. DDP adds no ``.grad`` of a weight.

Transformer Engine's interface for deferred dWs, from version 2.8 on, as far as it is used here: a module's backward
calls ``wgrad_store.put(tensors, function)``; ``function(*tensors)`` computes dW and, outside of fp8, the bias
gradient. ``backward_dw()`` is never called: it would report to DDP once per chunk. So Megatron's conditions on
``--delay-wgrad-compute`` do not apply.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as megatron_te

from megatron_lancet.errors import UsageError
from megatron_lancet.model.adopt import adopt
from megatron_lancet.model.linear import LinearByPlan, trains_unwatched
from megatron_lancet.runtime.factors import Factors, JoinedFactors, PartOfRows
from megatron_lancet.runtime.weight_grad_store import DeferredWeight, WeightGradStore

_CLASSES: tuple[type, ...] = (
    (
        megatron_te.TELinear,
        megatron_te.TEColumnParallelLinear,
        megatron_te.TERowParallelLinear,
        megatron_te.TELayerNormColumnParallelLinear,
        megatron_te.TELMHeadColumnParallelLinear,
        megatron_te.TEColumnParallelGroupedLinear,
        megatron_te.TERowParallelGroupedLinear,
    )
    if megatron_te.HAVE_TE
    else ()
)


def is_te_linear(module: torch.nn.Module) -> bool:
    """Whether ``module`` is one of Megatron's wrappers of Transformer Engine's linear modules."""
    return type(module) in _CLASSES


def has_te_linear(module: torch.nn.Module) -> bool:
    """Returns whether ``module`` has such a part. Transformer Engine ignores strides, or makes rows contiguous."""
    return any(isinstance(part, TELinearPerChunk) or is_te_linear(part) for part in module.modules())


def call_per_chunk(module: torch.nn.Module) -> "TELinearPerChunk":
    """Makes a module for which :func:`is_te_linear` holds ready to be called several times in a micro-batch."""
    stock: Any = type(module)
    adopted: Any = adopt(module, _subclass(stock))
    return adopted


@cache
def _subclass(stock: Any) -> Any:
    return type(f"{stock.__name__}PerChunk", (TELinearPerChunk, stock), {"__module__": __name__})


class _WeightWithPlaceholder(DeferredWeight):
    """A weight for which autograd finds a placeholder, or memory that a dW was or will be written to."""

    def report(self) -> None:
        self.parameter.grad = None
        super().report()
        # TELinearPerChunk.forward drops it too, but the next micro-batch's forward may already have run.
        vars(self.parameter).pop("grad_added_to_main_grad", None)


class _StoreOfModule:
    """Takes the place of Transformer Engine's ``WeightGradStore`` in a module."""

    enabled = True
    context = None

    def __init__(self, put: Callable[[Iterable[Any], Callable[..., Any]], None]) -> None:
        self.put = put

    def delay_wgrad_compute(self) -> bool:
        return True


class TELinearPerChunk(LinearByPlan):
    """Mixin for a linear module of Transformer Engine.

    It follows DDP's protocol for late gradients, as ``model/linear.py`` does for Megatron's own layers: DDP does not
    watch the weights, but hands this module the functions that report them. Until DDP has done so, or where nothing is
    deferred, the module computes dW as it is used to.

    Attributes:
        deferred: weights and biases whose gradients the store computes, in the module's order; empty without DDP.
        is_exact: whether gradients are summed in stock's order. May change between steps.
    """

    package = "transformer-engine"
    is_exact: bool = False

    deferred: Sequence[DeferredWeight] = ()
    _late: Mapping[str, torch.nn.Parameter] = {}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Forward pass of one chunk, as the module's own."""
        if self.is_first_microbatch:
            self._fp8_workspaces.clear()
            self.is_first_microbatch = False
        for parameter in self._late.values():
            # A fused module hands autograd a placeholder of the weight's size where it finds this attribute, and
            # nothing where it does not; autograd would add up one placeholder per chunk. See report().
            vars(parameter).pop("grad_added_to_main_grad", None)
        if self.deferred:  # the backward calls what is the module's store now
            self._refuse_later_hooks()
            part = self._grad_store.part
            store = self._store_of_chunk if part is None else _StoreOfModule(partial(self._gather, part))
            if self.wgrad_store is not store:  # a module checks every attribute that is set
                self.wgrad_store = store
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _refuse_later_hooks(self) -> None:
        """
        Raises:
            UsageError: a parameter has a gradient hook. Autograd calls hooks, and computes no deferred dW.
        """
        for name, parameter in self._late.items():
            if not trains_unwatched(parameter) and parameter.requires_grad and torch.is_grad_enabled():
                raise UsageError(
                    f"expected no gradient hook on the {name} of a {type(self).__bases__[-1].__name__}, found one: the "
                    "plan computes this gradient outside of autograd. Register it before the model is prepared, or "
                    "pass --lancet-plan off."
                )

    def begin_deferring(self: Any, name: str, store: WeightGradStore) -> None:
        """Marks the weights for DDP, which then calls :meth:`register_wgrad_accumulation_and_reduce_hooks`.

        Args:
            name: name of the weight gradient's op.
        """
        self._op_name, self._grad_store, self.deferred = name, store, []
        self._late = self._trained()
        self._unregistered = list(self._late)
        self._store_of_chunk = _StoreOfModule(self._put)
        self._by_kind: dict[str, Sequence[DeferredWeight | None]] = {}
        self._nodes: dict[str, Any] = {}
        self._seen: set[str] = set()
        for parameter in self._late.values():
            parameter.skip_backward_post_hook = True

    def keep_stocks_order(self, keeps: bool) -> None:
        """See :class:`ByPlan`."""
        self.is_exact = keeps

    @property
    def trains_weight(self: Any) -> bool:
        """Whether a weight is trained, so that there is a dW, and no hook waits for a gradient from autograd."""
        late = self._trained()
        return any(n.startswith("weight") for n in late) and all(map(trains_unwatched, late.values()))

    def _trained(self: Any) -> dict[str, torch.nn.Parameter]:
        """The weights and biases that are trained now, by name."""
        return {n: p for n, p in self.named_parameters(recurse=False) if _is_late(n) and p.requires_grad}

    def register_wgrad_accumulation_and_reduce_hooks(self: Any, report_ready: Callable[[], None]) -> None:
        """DDP calls this for each parameter that is marked, in the order of the module's parameters."""
        name = self._unregistered.pop(0)
        parameter = self._late[name]
        kind = _WeightWithPlaceholder if name.startswith("weight") else DeferredWeight
        # The op of several weights is named like the module, as is the op of one weight.
        op_name = f"{self._op_name}.{name}" if self.deferred else self._op_name
        self.deferred.append(kind(parameter, op_name, report_ready))
        if len(self.deferred) > 1 and not name.startswith("bias"):
            return
        # One backward function uses all parameters of the module: the last use of one is the last use of all. But in
        # fp8 that function returns the biases' gradients, and autograd visits the parameters' nodes one by one.
        use = parameter.expand_as(parameter).grad_fn
        assert use is not None
        self._nodes[name] = use.next_functions[0][0]  # the hook goes with the node
        self._nodes[name].register_hook(lambda *_: self._visited(name))

    def _visited(self: Any, name: str) -> None:
        """Notes that autograd has visited a parameter's node. After the last node no gradient is outstanding."""
        if name in self._seen:  # a backward pass has failed
            self._seen.clear()
        self._seen.add(name)
        if len(self._seen) < len(self._nodes):
            return
        self._seen.clear()
        for weight in self.deferred:
            self._grad_store.mark_last_use(weight)

    def _put(self: Any, tensors: Iterable[Any], function: Callable[..., Any]) -> None:
        """The module's backward calls this."""
        inputs, grad_outputs, *outputs = tensors
        outputs_of_dw = self._outputs_of_dw(outputs)
        _keep_layout_of_dw((inputs, grad_outputs))
        num_bytes = sum(map(_num_bytes, (inputs, grad_outputs)))

        def compute() -> None:
            self._compute(function, inputs, grad_outputs, *outputs_of_dw())

        self._grad_store.put(self.deferred, compute, num_bytes)

    def _outputs_of_dw(self: Any, outputs: Sequence[Any]) -> Callable[[], Sequence[Any]]:
        """What a dW writes to: main gradients, or buffers that are made when it runs."""
        if not self._is_grouped or self.fuse_wgrad_accumulation:
            return lambda: outputs
        (buffers,) = outputs
        shape, like = (len(buffers), *buffers[0].shape), buffers[0].new_empty(0)
        buffers[:] = [None] * len(buffers)  # the list that the module returns to autograd
        return lambda: [list(like.new_empty(shape))]

    def _gather(self: Any, part: PartOfRows, tensors: Iterable[Any], function: Callable[..., Any]) -> None:
        """As :meth:`_put`, for a part of the experts' rows: with the last one the factors of all are complete."""
        inputs, grad_outputs, *outputs = tensors
        outputs_of_dw = self._outputs_of_dw(outputs)
        if not self._is_grouped:
            whole = part.add(self, Factors(grad_outputs, inputs))
            if whole is not None:
                self._put_joined(function, [whole], outputs_of_dw)
            return
        pairs = enumerate(zip(grad_outputs, inputs, strict=True))
        wholes = [part.add(self, Factors(*pair), expert) for expert, pair in pairs]
        if wholes[0] is not None:
            self._put_joined(function, wholes, outputs_of_dw)

    def _put_joined(
        self: Any,
        function: Callable[..., Any],
        wholes: Sequence[JoinedFactors],
        outputs_of_dw: Callable[[], Sequence[Any]],
    ) -> None:
        """Puts the dW over the rows of all parts; of a grouped module a dW of each expert."""

        def compute() -> None:
            joined = [whole.joined() for whole in wholes]
            inputs, grads = [one.input_TI for one in joined], [one.grad_TO for one in joined]
            factors = (inputs, grads) if self._is_grouped else (inputs[0], grads[0])
            self._compute(function, *factors, *outputs_of_dw())

        self._grad_store.put(self.deferred, compute, sum(whole.num_bytes for whole in wholes))

    def _compute(self: Any, function: Callable[..., Any], *tensors: Any) -> None:
        results = function(*tensors)
        if self._is_grouped:
            # Outputs are the third argument: the main gradients, or buffers of their own.
            weight_grads, bias_grads = tensors[2], results[1]
        else:
            weight_grads, bias_grads = [results[0]], [results[1]]
        if not self.fuse_wgrad_accumulation:
            self._add("weight", weight_grads)
        if self.use_bias:
            self._add("bias", bias_grads)

    @cached_property
    def _is_grouped(self) -> bool:
        return hasattr(self, "num_gemms")

    def _add(self: Any, kind: str, grads: Iterable[torch.Tensor | None]) -> None:
        sum_first = self.has_several_uses and self.is_exact
        for deferred, grad in zip(self._deferred_of(kind), grads, strict=True):
            if deferred is not None and grad is not None and grad.numel():
                deferred.add_to_main_grad(grad, sum_first=sum_first)

    def _deferred_of(self: Any, kind: str) -> Sequence[DeferredWeight | None]:
        """The weights, or the biases, of the module in order; None for one that is not trained."""
        if kind not in self._by_kind:
            names = [f"{kind}{i}" for i in range(self.num_gemms)] if self._is_grouped else [kind]
            deferred = dict(zip(self._late, self.deferred, strict=True))
            self._by_kind[kind] = [deferred.get(name) for name in names]
        return self._by_kind[kind]


def _is_late(name: str) -> bool:
    """Whether the gradient of a parameter comes with the deferred GEMM; a norm weight's does not."""
    return name.rstrip("0123456789") in ("weight", "bias")


def _keep_layout_of_dw(tensors: Any) -> None:
    """Frees the data of quantized tensors in the layout that only dX needs: dX has been computed."""
    if type(tensors) is torch.Tensor:  # not quantized
        return
    if isinstance(tensors, list | tuple):
        for tensor in tensors:
            _keep_layout_of_dw(tensor)
    elif hasattr(tensors, "get_data_tensors") and all(data is not None for data in tensors.get_data_tensors()):
        tensors.update_usage(rowwise_usage=False, columnwise_usage=True)


def _num_bytes(tensors: Any) -> int:
    """Bytes of tensors, also quantized ones and lists of them."""
    if type(tensors) is torch.Tensor:
        return tensors.nbytes
    return sum(tensor.nbytes for tensor in _plain_tensors(tensors))


def _plain_tensors(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, list | tuple):
        for tensor in tensors:
            yield from _plain_tensors(tensor)
    elif hasattr(tensors, "get_data_tensors"):
        yield from _plain_tensors(tensors.get_data_tensors())
    elif isinstance(tensors, torch.Tensor):
        yield tensors
