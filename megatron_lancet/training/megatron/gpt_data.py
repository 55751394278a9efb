"""Batches and loss of GPT pretraining, as Megatron's training loop expects them from an entry script.

Legend of shapes: B micro-batch size, S sequence length of this rank.
"""

import argparse
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, get_tokenizer
from megatron.training.training import stimer
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature_parts import ReadBatch, Samples

_TENSOR_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
_PACKED_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
_BATCH_KEYS = (*_TENSOR_KEYS, *_PACKED_KEYS)
_SPIKY_LOSS_FACTOR = 10
"""A loss this many times its running average is reported by Megatron's rerun state machine."""


def _dataset_config(args: argparse.Namespace) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        inter_document_masking=args.dataloader_inter_document_masking,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )


def build_datasets(
    num_samples: list[int], vp_stage: int | None = None, kind: type | None = None
) -> tuple[Any, Any, Any]:
    """Build the train, validation and test datasets that the arguments name.

    Args:
        num_samples: samples to take from the train, validation and test split.
        vp_stage: virtual pipeline stage that reads the datasets.
        kind: class of the datasets; None for Megatron's GPT datasets.
    """
    args = get_args()

    def built_on_this_rank() -> bool:
        # The layers of every stage need the bounds of documents.
        is_read = _reads_tensors(vp_stage) or args.dataloader_inter_document_masking
        return is_read and parallel_state.get_tensor_model_parallel_rank() == 0

    dataset = kind or (MockGPTDataset if args.mock_data else GPTDataset)
    return BlendedMegatronDatasetBuilder(dataset, num_samples, built_on_this_rank, _dataset_config(args)).build()


def builder_of(samples: Samples | None) -> Callable[..., tuple[Any, Any, Any]]:
    """:func:`build_datasets` for samples of another kind; None for Megatron's."""
    build = partial(build_datasets, kind=None if samples is None else samples.dataset)
    # Megatron builds the datasets on every rank of such a provider, not only where the tensor rank is 0.
    build.is_distributed = True  # type: ignore[attr-defined]
    return build


def reader_of(args: argparse.Namespace, config: LancetConfig) -> ReadBatch | None:
    """Reads a feature's micro-batches; None for Megatron's.

    Raises:
        UsageError: the data set gives bounds of documents, and the installation lacks the part that reads them.
    """
    found = (feature.batches(args, config) for feature in config.features)
    read = next((one for one in found if one is not None), None)
    if read is None and args.dataloader_inter_document_masking:
        raise UsageError("this installation of Megatron-Lancet has no packed documents. Install the full package.")
    return read


def predicts_further(args: argparse.Namespace, vp_stage: int | None) -> bool:
    """Whether a pipeline stage of this rank has layers of multi-token prediction, which embed tokens.

    Args:
        vp_stage: virtual stage of this rank; None without virtual stages.
    """
    if args.mtp_num_layers is None:
        return False
    return mtp_on_this_rank(_pipeline_layout(args), args.mtp_num_layers, vp_stage is None, vp_stage)


def embedding_ranks(args: argparse.Namespace, pp_ranks: list[int]) -> list[int]:
    """Ranks that hold the embedding: of the first stage, of predictions, and of the last stage if weights are tied."""
    layout = _pipeline_layout(args)
    facts = argparse.Namespace(mtp_num_layers=args.mtp_num_layers, pipeline_model_parallel_layout=layout)
    tied = [] if args.untie_embeddings_and_output_weights else [pp_ranks[-1]]
    return sorted({pp_ranks[0], *tied, *get_mtp_ranks(pp_ranks, facts)})


def _pipeline_layout(args: argparse.Namespace) -> PipelineParallelLayerLayout | None:
    layout: str | PipelineParallelLayerLayout | None = args.pipeline_model_parallel_layout
    return PipelineParallelLayerLayout(layout, args.pipeline_model_parallel_size) if isinstance(layout, str) else layout


def _reads_tensors(vp_stage: int | None) -> bool:
    """Whether a pipeline stage of this rank reads tokens or labels."""
    return is_first_or_last_pipeline_stage(vp_stage) or predicts_further(get_args(), vp_stage)


def _next_batch(data_iterator: Any, vp_stage: int | None) -> dict[str, torch.Tensor | None]:
    """Fetch this rank's share of the next micro-batch: tensors [B, S], None for those that its stage does not read."""
    args = get_args()
    if not _reads_tensors(vp_stage):
        return dict.fromkeys(_BATCH_KEYS)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    num_samples = args.micro_batch_size if torch.is_grad_enabled() else args.eval_micro_batch_size
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        # Bounds of documents are left out: Megatron would share out samples by them.
        values = {key: sample.get(key) for key in _TENSOR_KEYS}
        batch = {key: value if value is None else value.cuda(non_blocking=True) for key, value in values.items()}
        batch |= dict.fromkeys(_PACKED_KEYS)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=batch["tokens"].shape[0] if tp_rank == 0 else num_samples,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_further(args, vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())


def _read(data_iterator: Any, model: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return _next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage")), {}


def _loss(
    loss_mask: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the masked token losses, number of tokens, and both in the form that Megatron logs.

    Args:
        loss_mask: [B, S], 1 where a token counts.
        token_losses: [B, S], cross entropy in nats.
    """
    args = get_args()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(token_losses.view(-1).float() * mask)
    rerun = get_rerun_state_machine()
    validate = partial(rerun.validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        for found, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            validate(rejection_func=found, message=f"found {name} in local forward loss calculation", fatal=True)
    if args.check_for_spiky_loss:
        is_spiky = partial(rerun.is_unexpectedly_large, threshold=_SPIKY_LOSS_FACTOR, context="loss")
        validate(rejection_func=is_spiky, message="Spiky loss", fatal=False)
    num_tokens = mask.sum().to(torch.int)
    reported = torch.cat([loss.detach().view(1), num_tokens.view(1).to(loss.dtype)])
    return loss, num_tokens, {"lm loss": reported}


def forward_step(
    data_iterator: Any,
    model: torch.nn.Module,
    *,
    return_schedule_plan: bool = False,
    read: ReadBatch | None = None,
) -> tuple[torch.Tensor | AbstractSchedulePlan, Callable[[torch.Tensor], Any]]:
    """Run one micro-batch through this stage; returns its output and the function that computes the loss from it.

    Args:
        return_schedule_plan: set by Megatron's own overlap (``--overlap-moe-expert-parallel-comm``). The step then
            runs nothing and returns Megatron's schedule of the micro-batch instead of the output.
        read: reads micro-batches; None for Megatron's.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    is_timed = get_args().log_straggler  # the detector logs a traceback for every error that passes it
    with stimer(bdata=True) if is_timed else nullcontext():
        batch, further = (read or _read)(data_iterator, model)
    timers("batch-generator").stop()
    inputs, loss_mask = map(batch.get, ("tokens", "position_ids", "attention_mask")), batch.get("loss_mask")
    run = cast(Any, model).build_schedule_plan if return_schedule_plan else model
    with stimer if is_timed else nullcontext():
        output = run(*inputs, labels=batch.get("labels"), loss_mask=loss_mask, **further)
    return output, partial(_loss, cast(torch.Tensor, loss_mask))
