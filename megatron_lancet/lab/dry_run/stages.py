"""Reads from Megatron which layers of the model each pipeline rank gets."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.training.layer_pattern import layer_kinds, pipeline_segments


@dataclass(frozen=True)
class ModelChunk:
    """A virtual pipeline stage: the layers that one rank runs without communication between stages.

    Attributes:
        layers: kind of each of its layers.
        num_mtp: number of multi-token prediction layers.
        has_output: whether it has the output layer and the loss.
        has_final_norm: whether it has the norm behind the last transformer layer.
    """

    layers: tuple[LayerKind, ...]
    num_mtp: int = 0
    has_embedding: bool = False
    has_output: bool = False
    has_final_norm: bool = False


@dataclass(frozen=True)
class PipelineStage:
    """The part of the model on one pipeline rank.

    Attributes:
        chunks: virtual stages in the order of the layers; one chunk without virtual stages.
    """

    chunks: tuple[ModelChunk, ...]

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """Kind of each layer of all chunks."""
        return tuple(layer for chunk in self.chunks for layer in chunk.layers)


def pipeline_stages(args: argparse.Namespace, config: Any) -> list[PipelineStage]:
    """Lists the pipeline ranks, first to last.

    Args:
        args: Megatron's arguments, validated.
        config: Megatron's TransformerConfig that was made from them.

    Raises:
        AssertionError, ValueError: Megatron can't distribute the layers.
        UsageError: see :func:`~megatron_lancet.training.layer_pattern.layer_kinds`.
    """
    pp_size, vp_size = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    kinds = iter(layer_kinds(args))
    segments = pipeline_segments(args) if config.is_hybrid_model else []
    chunks: dict[tuple[int, int], ModelChunk] = {}
    for vp_stage in range(vp_size or 1):  # the order in which a micro-batch passes through them
        for pp_rank in range(pp_size):
            contents = _contents(config, pp_rank, vp_stage, segments)
            layers = tuple(next(kinds) for _ in range(contents.count(LayerType.decoder)))
            chunks[pp_rank, vp_stage] = ModelChunk(
                layers, contents.count(LayerType.mtp), LayerType.embedding in contents, LayerType.loss in contents
            )
    last = max(chunks, key=lambda place: (bool(chunks[place].layers), place[1], place[0]))
    with_norm = last if config.mtp_num_layers and not config.is_hybrid_model else (pp_size - 1, (vp_size or 1) - 1)
    chunks[with_norm] = replace(chunks[with_norm], has_final_norm=True)
    return [PipelineStage(tuple(chunks[rank, stage] for stage in range(vp_size or 1))) for rank in range(pp_size)]


def _contents(config: Any, pp_rank: int, vp_stage: int, segments: Sequence[str]) -> list[LayerType]:
    """Lists the layers that Megatron builds for a virtual stage of a pipeline rank.

    Args:
        segments: the layers of each virtual stage, if a hybrid model's pattern says them.
    """
    pp_size, vp_size = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return list(layout.layout[pp_rank][vp_stage])
    if len(segments) > 1:
        num_layers = len(segments[vp_stage * pp_size + pp_rank])
    else:
        num_layers = get_num_layers_to_build(config, vp_stage if vp_size else None, pp_rank)
    contents = [LayerType.decoder] * num_layers
    if (pp_rank, vp_stage) == (0, 0):
        contents.append(LayerType.embedding)
    if (pp_rank, vp_stage) == (pp_size - 1, (vp_size or 1) - 1):
        contents += [LayerType.mtp] * (config.mtp_num_layers or 0) + [LayerType.loss]
    return contents
