"""Activation recompute of what lies between a chunk's collectives; no all-to-all is repeated.

Megatron's own checkpoints run a backward pass inside the backward pass: there a weight's gradient would seem complete
after each chunk, and a layer's all-to-alls would run a second time. torch's non-reentrant checkpoint leaves the graph
as it is and only makes saved tensors again, so the mirrored pipeline and the deferred dWs stay what they are. What a
segment receives stays in memory: a layer's input, and the rows that the experts got.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Recompute:
    """Which segments of a layer are recomputed in the backward pass.

    Attributes:
        attention: norms and attention, up to the router's input.
        mlp: a dense layer's MLP.
        experts: the experts, from the rows that arrived to the rows that leave.
        shared_experts: the experts that see all tokens.
    """

    attention: bool = False
    mlp: bool = False
    experts: bool = False
    shared_experts: bool = False


NOTHING = Recompute()
_EVERYTHING = Recompute(attention=True, mlp=True, experts=True, shared_experts=True)


def recompute_of_layer(config: TransformerConfig, index_in_stage: int) -> Recompute:
    """What Megatron's settings ask for in the layer with this index among those of its pipeline stage.

    The uniform method's groups of several layers are recomputed layer by layer: a segment ends at a collective anyway.
    """
    modules = config.recompute_modules or []
    if config.recompute_granularity == "full":
        everywhere = config.recompute_method != "block"
        return _EVERYTHING if everywhere or index_in_stage < (config.recompute_num_layers or 0) else NOTHING
    if config.recompute_granularity != "selective":
        return NOTHING
    moe = "moe" in modules
    return Recompute(mlp="mlp" in modules, experts=moe, shared_experts=moe or "shared_experts" in modules)


def maybe_recomputed[T](again: bool, segment: Callable[..., T], *args: Any) -> T:
    """``segment(*args)``; with ``again``, what it saves for the backward pass is dropped and made again there.

    Args:
        segment: has no lasting effect, and draws the same random numbers when it runs a second time.
    """
    if not again:
        return segment(*args)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = tracker.get_states()

    @contextmanager
    def with_first_states() -> Iterator[None]:
        now = tracker.get_states()
        tracker.set_states(states)
        try:
            yield
        finally:
            tracker.set_states(now)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), with_first_states()

    return checkpoint(segment, *args, use_reentrant=False, context_fn=contexts)
