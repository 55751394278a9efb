"""Shares out a micro-batch of documents over the ranks of a model-parallel group.

Megatron's ``get_batch_on_this_tp_rank`` does so for batches of ``--seq-length`` positions. Here each micro-batch may
have another number of samples and of positions: the ranks get its size first.
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron_lancet.errors import UsageError
from megatron_lancet.features.documents.batch import DTYPES, DocumentBatch
from megatron_lancet.model.transformer_block import LayersByPlan
from megatron_lancet.training.megatron.gpt_data import predicts_further

_INPUTS = ("tokens", "position_ids")
_TARGETS = ("labels", "loss_mask")
_NUM_SIZES = 5


def read_documents(
    args: argparse.Namespace, by_document: bool, data_iterator: Any, model: Any
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Reads this rank's share of the next micro-batch: :data:`~megatron_lancet.feature_parts.ReadBatch` with arguments.

    Args:
        by_document: see :meth:`DocumentBatch.packed_seq_params`.
    """
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    names = tensors_of_stage(vp_stage, predicts_further(args, vp_stage))
    batch = next_documents(data_iterator, names, args.sequence_parallel)
    if torch.is_grad_enabled() and not vp_stage:  # once for each micro-batch
        update_seqlen_stats_from_cu_seqlens(batch.bounds)  # Megatron's FLOPs of a training step
    is_ours = isinstance(get_attr_wrapped_model(model, "decoder"), LayersByPlan)
    batch = batch if is_ours else batch.end_to_end
    return batch.tensors, {"packed_seq_params": batch.packed_seq_params(is_ours, by_document)}


def tensors_of_stage(vp_stage: int | None, predicts_further: bool) -> tuple[str, ...]:
    """Names of the tensors [B, S] that a pipeline stage of this rank reads; all stages read the documents' bounds.

    Args:
        vp_stage: virtual stage of this rank; None without virtual stages.
        predicts_further: whether the stage has layers of multi-token prediction, which embed tokens.
    """
    stage = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    is_first = parallel_state.is_pipeline_first_stage(**stage)
    is_last = parallel_state.is_pipeline_last_stage(**stage)
    return (*(_INPUTS if is_first or predicts_further else ()), *(_TARGETS if is_last else ()))


def next_documents(
    data_iterator: Iterator[Mapping[str, Any]] | None, names: tuple[str, ...], sequence_parallel: bool
) -> DocumentBatch:
    """Read this rank's share of the next micro-batch. Collective over the tensor-parallel group.

    Args:
        data_iterator: yields batches as :meth:`DocumentBatch.read` takes them, of any size. It is read on the first
            rank of each tensor-parallel group; the pipeline stages and context-parallel ranks of a data-parallel rank
            each have one, and all yield the same batches.
        names: the tensors that this stage reads, see :func:`tensors_of_stage`.
        sequence_parallel: whether positions are shared out over the tensor-parallel group.

    Raises:
        UsageError: the batch has no bounds of documents, or its positions can't be shared out.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    batch = None
    if group.rank() == 0:
        assert data_iterator is not None, "every pipeline stage reads batches of documents"
        batch = DocumentBatch.read(next(data_iterator), names).on_device
    if group.size() > 1 or batch is None:
        batch = _broadcast(batch, names, group)
    context_group = parallel_state.get_context_parallel_group()
    check_shares(batch.num_positions, context_group.size(), group.size() if sequence_parallel else 1)
    if context_group.size() == 1:
        return batch
    # Each sample is cut into slices of equal size, wherever its documents end.
    tensors = get_batch_on_this_cp_rank(
        dict(batch.tensors), is_hybrid_cp=False, cp_group=context_group, use_per_sequence_balancing=True
    )
    return replace(batch, tensors=tensors)


def _broadcast(batch: DocumentBatch | None, names: tuple[str, ...], group: dist.ProcessGroup) -> DocumentBatch:
    """Sends a batch from the first rank of ``group``; the others have None."""
    device, source = torch.cuda.current_device(), parallel_state.get_tensor_model_parallel_src_rank()
    if batch is not None:
        sizes = [batch.num_samples, batch.num_positions, batch.longest, batch.bounds.numel(), batch.has_fill]
        for sent in (torch.tensor(sizes, device=device), batch.bounds.to(device), *batch.tensors.values()):
            dist.broadcast(sent, source, group)
        return batch

    def received(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(tensor, source, group)
        return tensor

    num_samples, num_positions, longest, num_bounds, has_fill = received((_NUM_SIZES,), torch.int64).tolist()
    bounds = received((num_bounds,), torch.int32).cpu()
    shape = num_samples, num_positions
    tensors = {name: received(shape, dtype) for name, dtype in DTYPES.items() if name in names}
    return DocumentBatch(tensors, bounds, num_samples, num_positions, longest, bool(has_fill))


def check_shares(num_positions: int, context_size: int, sequence_size: int) -> None:
    """
    Raises:
        UsageError: positions of a batch can't be shared out evenly.
    """
    multiple = math.lcm(2 * context_size if context_size > 1 else 1, context_size * sequence_size)
    if num_positions % multiple != 0:
        parts = [f"2 x --context-parallel-size {context_size}"] if context_size > 1 else []
        parts += [f"--tensor-model-parallel-size {sequence_size} of --sequence-parallel"] if sequence_size > 1 else []
        raise UsageError(
            f"a batch has samples of {num_positions} positions, which {' and '.join(parts)} can't share out: it takes "
            f"a multiple of {multiple}. Pad the samples, or change the layout."
        )
