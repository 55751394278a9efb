"""Records which experts tokens choose while a model is evaluated.

Legend: s positions, b windows of a batch, t = s * b tokens, E experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_lancet.errors import UsageError
from megatron_lancet.inference.load import LoadedModel
from megatron_lancet.planning.load.popularity import Choice


class ChoiceRecorder:
    """What the routers of a model chose in its last forward pass."""

    def __init__(self) -> None:
        self._maps: dict[int, torch.Tensor] = {}

    def record(self, router: TopKRouter, _inputs: Any, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        """A forward hook of a router, whose outputs are probabilities and the routing map, [t, E] each."""
        assert router.layer_number is not None
        self._maps[router.layer_number] = outputs[1]

    def rows(self, weights: torch.Tensor) -> dict[int, list[int]]:
        """Rows of each expert, [E], by layer.

        Args:
            weights: 0 for tokens that don't count, else 1, [b, s].
        """
        counts = _in_token_order(weights)
        return {layer: chosen[counts].sum(0).tolist() for layer, chosen in self._maps.items()}

    def choices(self, weights: torch.Tensor) -> dict[int, list[Choice]]:
        """Each token's experts, by layer.

        Args:
            weights: as for :meth:`rows`.
        """
        counts = _in_token_order(weights)
        return {layer: _as_choices(chosen[counts]) for layer, chosen in self._maps.items()}


def _in_token_order(weights: torch.Tensor) -> torch.Tensor:
    """Whether each token counts, [t], in the order of routers: all windows' first positions come first."""
    return weights.t().reshape(-1) > 0


def _as_choices(chosen_tE: torch.Tensor) -> list[Choice]:
    experts = iter(chosen_tE.nonzero()[:, 1].tolist())
    return [tuple(islice(experts, number)) for number in chosen_tE.sum(1).tolist()]


@contextmanager
def recorded_choices(model: LoadedModel) -> Iterator[ChoiceRecorder]:
    """Inside the context the recorder has the choices of the model's last forward pass."""
    recorder = ChoiceRecorder()
    hooks = [router.register_forward_hook(recorder.record) for router in routers_of(model)]
    try:
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()


def routers_of(model: LoadedModel) -> list[TopKRouter]:
    """The routers of a model, in the order of its layers.

    Raises:
        UsageError: it has none.
    """
    found = [module for module in model.module.modules() if isinstance(module, TopKRouter)]
    if not found:
        raise UsageError("the checkpoint holds a model without experts: nothing is routed.")
    return found
