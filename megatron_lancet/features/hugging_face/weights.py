"""Weights between a Hugging Face folder and the stages of a model, by Megatron-Bridge's mappings."""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.features.hugging_face.flags import FROM
from megatron_lancet.features.hugging_face.source import Source
from megatron_lancet.module_types import register_module_types
from megatron_lancet.runtime.collectives import from_all_ranks

_NO_WEIGHTS = ("rotary_emb.inv_freq", "_scale_inv")
"""Ends of names of tensors that a model computes, or that Bridge reads with another one."""
_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
"""Ends of names in layers that predict further tokens: files repeat the model's, which these layers share."""
_EXPERT = re.compile(r"\.experts\.\d+\.")
_SLOT = re.compile(r"\.layers\.(\d+)\.(.*\.experts)\.(\d+)\.")
_MAX_NAMES = 3


def load(source: Source, stages: Sequence[torch.nn.Module]) -> None:
    """Copies the folder's weights into unwrapped stages. Collective over all ranks.

    Raises:
        UsageError: the folder lacks a weight of the model, or has weights that the model lacks.
    """
    models = _prepared(stages)
    _check_coverage(source, models)
    source.weights.load_weights_hf_to_megatron(source.pretrained, models)


def stream(source: Source, stages: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the model's names and tensors in Hugging Face's format. Collective over all ranks, which get the same."""
    models = _prepared(stages)
    experts = _experts_of_slots(models)

    def renamed(match: re.Match[str]) -> str:
        layer, path, slot = match.groups()
        order = experts.get(int(layer))
        return f".layers.{layer}.{path}.{slot if order is None else order[int(slot)]}."

    tensors = source.weights.stream_weights_megatron_to_hf(models, source.pretrained, cpu=True, show_progress=False)
    yield from ((_SLOT.sub(renamed, name), tensor) for name, tensor in tensors)


def _prepared(stages: Sequence[torch.nn.Module]) -> list[Any]:
    """Tells Bridge the kinds of the model's classes, and whether its embeddings are tied."""
    models: list[Any] = list(stages)
    for model in models:
        model.config.share_embeddings_and_output_weights = model.share_embeddings_and_output_weights
    register_module_types(models)
    return models


def _experts_of_slots(models: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """The expert in each slot of layers whose experts were placed, by layer. Collective over all ranks."""
    own = {}
    for model in models:
        for name, module in model.named_modules():
            slots = getattr(module, "slots", None) if name.endswith(".mlp.experts") else None
            if slots is not None:
                layer = model.get_submodule(name.removesuffix(".mlp.experts"))
                behind = model.config.num_layers + int(name.split(".")[2])
                own[behind if name.startswith("mtp.") else layer.layer_number - 1] = tuple(slots.experts)
    return {number: experts for one in from_all_ranks(own) for number, experts in one.items()}


def expected_names(source: Source) -> set[str]:
    """Names of the tensors that a model is made of. A folder may have more."""
    return {
        name
        for name in source.tensor_names()
        if not name.endswith(_NO_WEIGHTS)
        and not (_is_behind(source, name) and (not source.provider.mtp_num_layers or name.endswith(_COPIES)))
    }


def _is_behind(source: Source, name: str) -> bool:
    """Whether a tensor is of a layer behind the decoder, which predicts further tokens."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= source.provider.num_layers


def _check_coverage(source: Source, models: Sequence[Any]) -> None:
    tasks = [task for task in source.weights.build_conversion_tasks(source.pretrained, models) if task is not None]
    loaded = {(task.vp_stage, task.param_name) for task in tasks if task.megatron_module is not None}
    missing = [name for stage, name in _own_weights(models) if (stage, name) not in loaded]
    mappings = [task.mapping for task in tasks]
    if models[0].share_embeddings_and_output_weights:  # a folder may have both all the same
        mappings.append(source.weights.mapping_registry().megatron_to_hf_lookup("output_layer.weight"))
    names = [[one.hf_param] if isinstance(one.hf_param, str) else [*one.hf_param.values()] for one in mappings]
    everywhere = from_all_ranks((missing, {_any_expert(name) for some in names for name in some}))
    missing = sorted({name for names, _ in everywhere for name in names})
    used = {name for _, names in everywhere for name in names}
    unused = sorted(name for name in expected_names(source) if _any_expert(name) not in used)
    if missing:
        raise UsageError(f"{FROM} {source.folder}: expected weights for {_some(missing)}, found none. Is it complete?")
    if unused:
        raise UsageError(
            f"{FROM} {source.folder}: the model has no place for its weights {_some(unused)}, because Megatron-Bridge "
            f"describes {source.architecture} without them. Train it in Megatron-Bridge, or take another model."
        )


def _own_weights(models: Sequence[Any]) -> Iterator[tuple[int, str]]:
    from megatron.bridge.models.conversion.utils import persistent_buffers

    for stage, model in enumerate(models):
        tied = model.share_embeddings_and_output_weights
        for name, _ in itertools.chain(model.named_parameters(), persistent_buffers(model)):
            if "_extra_state" not in name and not (tied and name == "output_layer.weight"):
                yield stage, name


def _any_expert(name: str) -> str:
    return _EXPERT.sub(".experts.*.", name)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
