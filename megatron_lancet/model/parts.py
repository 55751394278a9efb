"""The interface of a model's optional parts, which ``registry.py`` names.

The core runs the plain dispatch of a GPT's decoder, one message for all rows of a chunk. A part adds a dispatcher,
replaces ops of a layer, refuses plans, or prepares modules that are not in the core.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.model.dispatcher.base import Dispatcher, ExpertRanks
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.model.overlapping_moe import ForwardOps
from megatron_lancet.model.samples import DocumentReader
from megatron_lancet.registry import model_parts
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule.plan import Dispatch, Plan, Segment
from megatron_lancet.schedule.turns import Verb


class Stack(Protocol):
    """Layers that run by a plan.

    Attributes:
        overlapping_layers: the layers, prepared for chunks.
    """

    @property
    def overlapping_layers(self) -> Sequence[Any]: ...

    def run_by(self, plan: Plan) -> None:
        """Runs ``plan`` from the next micro-batch on."""

    def num_waits(self, at_end: bool) -> int:
        """Number of messages that the forward of a micro-batch waits for.

        Args:
            at_end: whether it is one at an end of a step with pairing.
        """


type PrepareLayer = Callable[..., Any]
"""Prepares a layer that Megatron built for chunks: of the layer, its number, its recompute and the model's comm."""


class ModelPart:
    """An optional part of a model. Every method may be left out."""

    def block_class(self, model: Any) -> type[Any] | None:
        """The class that the stack of layers of a model becomes; None for a model that the part does not support."""
        return None

    def prepare_layers(self, model: Any, comm: Comm, prepare: PrepareLayer) -> None:
        """Prepares layers behind the decoder, which is prepared."""

    def stacks(self, model: Any) -> Sequence[Stack]:
        """The stacks of layers behind the decoder, of a model that is prepared."""
        return []

    def adopt_modules(self, model: Any) -> None:
        """Adopts modules of a model whose layers are prepared."""

    def adopt_attention(self, core: torch.nn.Module) -> None:
        """Adopts a core attention whose own kernel takes chunks of a sequence."""

    def adopt_experts(self, experts: torch.nn.Module) -> None:
        """Adopts the local experts of a layer."""

    def needs_dense_rows(self, experts: torch.nn.Module) -> bool:
        """Whether the kernels of the local experts need contiguous rows."""
        return False

    def parts_with_several_uses(self, model: Any) -> Iterable[torch.nn.Module]:
        """The parts of a model that run more than once in a micro-batch, also without chunks."""
        return ()

    def document_reader(self, model: Any = None) -> DocumentReader | None:
        """Reads the documents of packed samples; None where the part has no documents.

        Args:
            model: the model whose chunks are cut by the cost of documents; None for chunks of equal sizes.
        """
        return None

    def layer_ops(self) -> Mapping[Verb, Callable[[Any, ChunkState], None]]:
        """The ops of a layer that it adds."""
        return {}

    def dispatchers(self, ranks: ExpertRanks) -> Mapping[Dispatch, Dispatcher]:
        """The dispatchers that it adds to a layer with experts."""
        return {}

    def ops(self, segment: Segment, dispatch: Dispatch, ops: ForwardOps) -> ForwardOps:
        """The ops of a layer with experts that it adds or replaces.

        Args:
            segment: the segment of the plan.
            dispatch: what all-to-alls carry.
            ops: the ops so far.
        """
        return {}

    def check_plan(self, plan: Plan, model: Any, max_expert_rows: int | None) -> None:
        """
        Args:
            max_expert_rows: rows of a chunk that a rank's experts may work on at a time; None for any number.

        Raises:
            UsageError: the plan needs what the model, prepared for plans, does not have.
        """


def document_reader(model: Any = None) -> DocumentReader:
    """Reads the documents of packed samples; see :meth:`ModelPart.document_reader`.

    Raises:
        UsageError: the installation does not have the part for documents.
    """
    for part in model_parts():
        reader = part.document_reader(model)
        if reader is not None:
            return reader
    raise UsageError("this installation of Megatron-Lancet has no packed documents. Install the full package.")
