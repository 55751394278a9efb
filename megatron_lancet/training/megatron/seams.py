"""Megatron's internals that this project uses: every function and parameter, checked before training starts.

Another version of Megatron then fails with one sentence that names what it lacks, and not in the middle of a step.
The changes to Megatron are in the other files of this folder.
"""

import inspect
from collections.abc import Container, Iterable, Sequence
from typing import Any

from megatron.core import packed_seq_params, parallel_state, tensor_parallel, utils
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets import utils as dataset_utils
from megatron.core.dist_checkpointing import mapping
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.tensor_parallel import CheckpointWithoutOutput, mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_token_prediction, torch_norm
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock, MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import arguments, checkpointing, global_vars, training
from megatron.training.utils import common_utils

from megatron_lancet.errors import UsageError
from megatron_lancet.registry import features

type Seam = tuple[Any, str, tuple[str, ...]]
"""A module or class, the name of a function in it, and the names of the parameters that are used."""

_MODEL_INPUTS = ("input_ids", "position_ids", "attention_mask", "labels", "loss_mask", "packed_seq_params")
_PACKED_SEQ_PARAMS = (
    *("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
    "tokens_per_sample",
)

_MODEL: tuple[Seam, ...] = (
    (GPTModel, "forward", _MODEL_INPUTS),
    (HybridModel, "forward", _MODEL_INPUTS),
    (TransformerBlock, "forward", ("hidden_states", "attention_mask", "rotary_pos_emb", "attention_bias")),
    (HybridStack, "forward", ("hidden_states", "attention_mask", "inference_context", "rotary_pos_emb")),
    (TransformerLayer, "_forward_attention", ("hidden_states", "attention_mask", "rotary_pos_emb", "attention_bias")),
    (TransformerLayer, "_forward_mlp", ("hidden_states",)),
    (MultiTokenPredictionBlock, "forward", ("hidden_states",)),
    (multi_token_prediction, "roll_tensor", ("tensor", "shifts", "dims", "cp_group", "packed_seq_params")),
    (MultiTokenPredictionLayer, "_checkpointed_forward", ("hidden_states", "decoder_input")),
    (
        MultiTokenPredictionLayer,
        "_proj_and_transformer_layer",
        ("hidden_states", "decoder_input", "attention_mask", "rotary_pos_emb", "attention_bias"),
    ),
    (MultiTokenPredictionLayer, "_concat_embeddings", ("hidden_states", "decoder_input")),
    (MultiTokenPredictionLayer, "_postprocess", ("hidden_states",)),
    (DotProductAttention, "__init__", ("config", "pg_collection")),
    (
        DotProductAttention,
        "forward",
        ("query", "key", "value", "attention_mask", "attention_bias", "packed_seq_params"),
    ),
    (RotaryEmbedding, "forward", ("max_seq_len", "offset")),
    (LocalSpecProvider, "core_attention", ()),
    (mappings, "gather_from_sequence_parallel_region", ("input_", "group")),
    (utils, "get_batch_on_this_cp_rank", ("batch", "is_hybrid_cp", "cp_group", "use_per_sequence_balancing")),
    (packed_seq_params, "PackedSeqParams", _PACKED_SEQ_PARAMS),
    (gpt_dataset, "GPTDatasetConfig", ("inter_document_masking",)),
    (MoELayer, "shared_experts_compute", ("hidden_states",)),
    (SequentialMLP, "forward", ("permuted_local_hidden_states", "tokens_per_expert", "permuted_probs")),
    (MLP, "forward", ("hidden_states", "per_token_scale")),
    (TopKRouter, "forward", ("input", "padding_mask")),
    (TopKRouter, "gating", ("input",)),
    (TopKRouter, "apply_z_loss", ("logits",)),
    (TopKRouter, "_apply_aux_loss", ("probs", "scores_for_aux_loss", "routing_map")),
    (TopKRouter, "_apply_seq_aux_loss", ("probs", "scores_for_aux_loss", "routing_map", "seq_length", "bsz")),
    (TopKRouter, "_apply_global_aux_loss", ("probs", "scores_for_aux_loss", "routing_map")),
    (TopKRouter, "_apply_expert_bias", ("routing_map",)),
    (TopKRouter, "routing", ("logits", "padding_mask")),
    (
        TopKRouter,
        "attach_and_log_load_balancing_loss",
        ("activation", "aux_loss_coeff", "aux_loss", "aux_loss_name", "reduce_group", "valid_token_count"),
    ),
    (TopKRouter, "_maintain_float32_expert_bias", ()),
    (moe_utils, "permute", ("tokens", "routing_map", "probs", "num_out_tokens", "fused")),
    (moe_utils, "unpermute", ("permuted_tokens", "sorted_indices", "restore_shape", "routing_map", "fused")),
    (moe_utils, "sort_chunks_by_idxs", ("input", "split_sizes", "sorted_idxs", "probs", "fused")),
    (moe_utils, "compute_routing_scores_for_aux_loss", ("logits", "topk", "score_function", "fused")),
    (token_dispatcher, "gather_from_sequence_parallel_region", ("input_", "group")),
    (torch_norm.WrappedTorchNorm, "__new__", ("config", "hidden_size", "eps")),
    (tensor_parallel, "CheckpointWithoutOutput", ()),
    (CheckpointWithoutOutput, "checkpoint", ("run_function",)),
    (CheckpointWithoutOutput, "discard_output_and_register_recompute", ("hook_tensor",)),
    (ColumnParallelLinear, "_forward_impl", ("input", "weight")),
    (RowParallelLinear, "_forward_impl", ("input", "weight")),
)

_TRAINING: tuple[Seam, ...] = (
    (dataset_utils, "compile_helpers", ()),
    (DistributedDataParallel, "__init__", ("ddp_config", "module")),
    (DistributedDataParallel, "_make_backward_post_hook", ("param",)),
    (training, "pretrain", ("cfg_container", "train_valid_test_dataset_provider", "model_type", "forward_step_func")),
    (training, "train", ()),
    (training, "update_seqlen_stats_from_cu_seqlens", ("cu_seqlens",)),
    (training, "build_pretraining_data_loader", ("dataset", "consumed_samples")),
    (training, "train_step", ("forward_step_func", "data_iterator", "model")),
    (GPTModel, "forward", ("loss_mask", "padding_mask")),
    (
        GPTModel,
        "build_schedule_plan",
        ("input_ids", "position_ids", "attention_mask", "labels", "loss_mask", "packed_seq_params"),
    ),
    (GPTModel, "sharded_state_dict", ("metadata",)),
    (checkpointing, "_build_sharded_state_dict_metadata", ("args",)),
    (checkpointing, "check_checkpoint_args", ("checkpoint_args",)),
    (checkpointing, "_load_base_checkpoint", ("load_dir", "args", "rank0")),
    (mapping, "apply_factories", ("sharded_state_dict",)),
    (RerunStateMachine, "validate_result", ()),
    (training, "is_last_rank", ()),
    (common_utils, "is_last_rank", ()),
    (global_vars, "get_tensorboard_writer", ()),
    (parallel_state, "get_nccl_options", ("pg_name", "nccl_comm_cfgs")),
    (arguments, "add_megatron_arguments", ("parser",)),
    (arguments, "validate_args", ("args",)),
    (arguments, "_print_args", ("title", "args")),
)

_SCHEDULES: tuple[Seam, ...] = (
    (
        schedules,
        "forward_step",
        (
            "forward_step_func",
            "data_iterator",
            "model",
            "num_microbatches",
            "input_tensor",
            "forward_data_store",
            "config",
            "cp_group_size",
            "collect_non_loss_data",
            "is_first_microbatch",
            "current_microbatch",
            "vp_stage",
            "is_last_stage",
        ),
    ),
    (schedules, "backward_step", ("input_tensor", "output_tensor", "output_tensor_grad", "config")),
    (schedules, "forward_backward_no_pipelining", ("model", "forward_only")),
    (schedules, "forward_backward_pipelining_without_interleaving", ("model", "forward_only")),
    (schedules, "forward_backward_pipelining_with_interleaving", ("model", "forward_only")),
)

_ON_CPU: tuple[Seam, ...] = (
    (mappings, "_gather_along_first_dim", ("input_", "group", "output_split_sizes")),
    (mappings, "_reduce_scatter_along_first_dim", ("input_", "group", "input_split_sizes")),
    (token_dispatcher, "maybe_move_tensor_to_cpu", ("tensor", "as_numpy", "record_stream")),
)

_ON_VIRTUAL_GPU: tuple[Seam, ...] = (
    (fused_bias_swiglu, "swiglu", ()),
    (fused_bias_swiglu, "bias_swiglu", ()),
    (fused_bias_swiglu, "weighted_swiglu", ()),
    (fused_bias_swiglu, "swiglu_back", ()),
    (fused_bias_swiglu, "bias_swiglu_back", ()),
    (fused_bias_swiglu, "weighted_swiglu_back", ()),
)

EXPERT_GROUPS = ("ep", "tp_ep_mp")
"""Megatron's names of the process groups on which a plan's rows and token counts are sent."""

SEAMS: tuple[Seam, ...] = (*_MODEL, *_TRAINING, *_SCHEDULES, *_ON_CPU, *_ON_VIRTUAL_GPU)
"""All functions that this project calls, overrides or changes, with the parameters that it relies on."""

_DDP_PROTOCOLS = ("skip_backward_post_hook", "register_wgrad_accumulation_and_reduce_hooks")
"""Attributes of weights that make DDP accept their gradients later."""

_DDP_STREAM = "with torch.cuda.stream(ddp_stream):"
"""The stream on which DDP wraps a model; weights are reported on it, see ``runtime/weight_grad_store.py``."""

_ONE_CONNECTION = "assert os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS') == \"1\""
"""The assertion in Megatron's ``validate_args`` that ``cluster_patches.any_number_of_connections`` satisfies."""

_TWO_SLICES_PER_RANK = (
    (utils, "_get_batch_on_this_cp_rank_per_sequence_balancing"),
    (rope_utils, "get_pos_emb_on_this_cp_rank"),
)
"""Functions that cut sequences for context parallelism in the way that ``model/attention/sdpa.py`` expects."""

_DROP_OUTPUTS = (
    (TransformerLayer, "_forward_attention"),
    (TransformerLayer, "_forward_pre_mlp_layernorm"),
    (MLASelfAttention, "get_query_key_value_tensors"),
    (TEGroupedMLP, "forward"),
)
"""Functions that look up the class in which ``model/recompute.py`` takes the place of Megatron's own."""


def check_seams(but: Container[str] = ()) -> None:
    """Raise a UsageError that names each function, parameter or piece of code that Megatron lacks, except ``but``."""
    missing = missing_functions(SEAMS)
    ddp_source = inspect.getsource(DistributedDataParallel.__init__)
    missing += [f"DistributedDataParallel's {protocol}" for protocol in _DDP_PROTOCOLS if protocol not in ddp_source]
    missing += [seam for feature in features() for seam in feature.missing_seams()]
    if _DDP_STREAM not in inspect.getsource(training.get_model):
        missing.append(f"the line {_DDP_STREAM!r} in training.get_model")
    for module, name in _TWO_SLICES_PER_RANK:
        if "2 * cp_size - cp_rank - 1" not in inspect.getsource(getattr(module, name, module)):
            missing.append(f"the cut of a sequence into two slices per rank in {module.__name__}.{name}")
    for owner, name in _DROP_OUTPUTS:
        if "tensor_parallel.CheckpointWithoutOutput(" not in inspect.getsource(getattr(owner, name, owner)):
            missing.append(f"the use of tensor_parallel.CheckpointWithoutOutput in {owner.__name__}.{name}")
    groups = inspect.getsource(parallel_state.initialize_model_parallel)
    for name in EXPERT_GROUPS:
        if f'get_nccl_options("{name}", nccl_comm_cfgs)' not in groups:
            missing.append(f"NCCL's options of group {name} in initialize_model_parallel")
    validation = inspect.getsource(arguments.validate_args)
    if _ONE_CONNECTION not in validation:
        missing.append("the assertion of one CUDA connection in validate_args")
    if "os.environ[" in validation:
        missing.append("a validate_args that leaves the environment as it is")
    refuse_missing([one for one in missing if one not in but])


def missing_functions(seams: Iterable[Seam]) -> list[str]:
    """Names the functions and parameters of ``seams`` that Megatron lacks."""
    missing = []
    for owner, name, parameters in seams:
        function = getattr(owner, name, None)
        where = f"{owner.__name__}.{name}"
        if function is None:
            missing.append(where)
            continue
        # jit-fused functions are compiled wrappers: the signature belongs to the function inside.
        known = inspect.signature(inspect.unwrap(function)).parameters
        missing += [f"{where}({parameter})" for parameter in parameters if parameter not in known]
    return missing


def refuse_missing(missing: Sequence[str]) -> None:
    """Raise a UsageError if anything is missing."""
    if missing:
        raise UsageError(
            "this megatron-core differs from the supported versions: it lacks " + ", ".join(missing) + ". "
            "Install megatron-core 0.19.2."
        )
