"""The order of a MoE layer and the dense layer behind it, where the routed sum is added after both.

    MoE layer    attention … launch dispatch, shared experts             wait, experts, launch combine       wait, sum
    dense layer                                              attention                                   MLP

Rows are under way beside the shared experts and the dense layer's attention, experts' outputs beside its MLP.
"""

from collections.abc import Iterator, Sequence

from megatron_lancet.schedule.ops import AddResidual, Compute, Layer, OpKind, Wait

NAME = "late-sum"
"""The name of :func:`late_sum` in ``registry.py``."""
ADD_SHARED = AddResidual(OpKind.SHARED_EXPERTS)
"""Adds the output of the shared experts to the residual, at once."""
_ATTENTION, _MLP = Compute(OpKind.ATTENTION), Compute(OpKind.MLP)


def late_sum(layers: Sequence[tuple[int, Layer]]) -> list[tuple[int, Layer]]:
    """The verbs of MoE and dense layers in turn.

    Args:
        layers: global number and verbs of each, whole pairs.
    """
    assert len(layers) % 2 == 0, "refused when the plan was chosen"
    pairs = zip(layers[::2], layers[1::2], strict=True)
    return [piece for moe, dense in pairs for piece in _pair(moe, dense)]


def _pair(moe: tuple[int, Layer], dense: tuple[int, Layer]) -> Iterator[tuple[int, Layer]]:
    (number, layer), (next_number, behind) = moe, dense
    assert behind == (_ATTENTION, _MLP), "refused before the model was built"
    middle = layer.index(Compute(OpKind.SHARED_EXPERTS)) + 1
    last_wait = max(index for index, verb in enumerate(layer) if isinstance(verb, Wait))
    yield number, (*layer[:middle], ADD_SHARED)
    yield next_number, (_ATTENTION,)
    yield number, layer[middle:last_wait]
    yield next_number, (_MLP,)
    yield number, layer[last_wait:]
