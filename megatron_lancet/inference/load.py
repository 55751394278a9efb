"""A model from a checkpoint, described by the checkpoint's own arguments, on any number of ranks.

The ranks share the experts of each layer (expert parallel size = number of ranks) and hold all other weights in full,
whatever the layout of the training was: Megatron's distributed checkpoints load into any layout.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling.torch_sampling import TorchSampling
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lancet.data.encode import SENTENCEPIECE_TYPES, TokenizerSettings, build_tokenizer, megatron_builder
from megatron_lancet.data.hugging_face import HUGGING_FACE_TYPE
from megatron_lancet.errors import UsageError
from megatron_lancet.inference.checkpoint_reader import StoredRun
from megatron_lancet.training.arguments import default_arguments
from megatron_lancet.training.megatron.models import build_plain_gpt
from megatron_lancet.training.megatron.patches import fused_core_attention
from megatron_lancet.training.megatron.seams import Seam, missing_functions, refuse_missing
from megatron_lancet.training.plan.flag_mapping import OTHER_DISPATCHERS
from megatron_lancet.training.plan.support import OVERLAP_FLAGS, OWN_DISPATCHER
from megatron_lancet.training.platform.detect import apply_cpu_settings

_NOT_FOR_INFERENCE: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "context_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "tp_comm_overlap": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
    "cpu_offloading_num_layers": 0,
    "optimizer_cpu_offload": False,
    "use_precision_aware_optimizer": False,
    "async_save": False,
    "use_megatron_fsdp": False,
    "use_torch_fsdp2": False,
    **dict.fromkeys(OVERLAP_FLAGS.values(), False),
    "gradient_accumulation_fusion": False,
    "fp8_param_gather": False,
    "masked_softmax_fusion": False,  # apex's kernels, which training by another attention kernel did not need
    "moe_router_force_load_balancing": False,
    "moe_token_dispatcher_type": OWN_DISPATCHER,
    **{field.name: field.default for field in fields(TransformerConfig) if field.name.startswith(OTHER_DISPATCHERS)},
    "moe_expert_rank_capacity_factor": None,  # of these dispatchers, and so is the next one
    "moe_paged_stash": False,
    "mtp_num_layers": None,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "distributed_backend": "nccl",
    # Every weight comes from the checkpoint.
    "perform_initialization": False,
    "use_cpu_initialization": True,
}
"""Training arguments that change how or when the work is done, but not the model's function."""

_SEAMS: tuple[Seam, ...] = (
    (StaticInferenceContext, "__init__", ("max_batch_size", "max_sequence_length")),
    (StaticInferenceContext, "enable_decode_mode", ()),
    (GPTInferenceWrapper, "__init__", ("model", "inference_context")),
    (GPTInferenceWrapper, "prep_inference_input", ("prompts_tokens",)),
    (GPTInferenceWrapper, "get_batch_for_context_window", ("inference_input", "context_start_position")),
    (GPTInferenceWrapper, "run_one_forward_step", ("inference_input",)),
    (InferenceMode, "active", ()),
    (TorchSampling, "sample_from_logits", ("temperature", "top_k", "top_p", "generator", "vocab_size")),
    (dist_checkpointing, "load", ("sharded_state_dict", "checkpoint_dir")),
    (parallel_state, "initialize_model_parallel", ("expert_model_parallel_size", "expert_tensor_parallel_size")),
)
"""Functions of Megatron that this package uses next to those in ``training/megatron/seams.py``."""

_REFUSED = {
    "spec": "--spec, a Python file",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "yaml_cfg": "--yaml-cfg",
}
"""Flags of checkpoints that are refused: their model is defined by code, or is no GPT."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, in evaluation mode.

    Attributes:
        module: takes tokens, position ids and an attention mask.
        context_length: number of tokens that it was trained to see at once.
        can_cache: whether keys and values of earlier tokens can be kept.
        num_ranks: number of ranks that share its experts.
    """

    module: torch.nn.Module
    context_length: int
    can_cache: bool
    device: torch.device
    rank: int
    num_ranks: int


def number_of_ranks() -> int:
    """Processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_ranks(run: StoredRun, num_ranks: int) -> None:
    """Raise a UsageError if this number of ranks can't share the experts, or if the model is of an unsupported kind."""
    experts: int = getattr(run.arguments, "num_experts", None) or 0
    if num_ranks > 1 and not experts:
        raise UsageError(
            f"{run.folder} holds a model without experts: there is nothing to share among {num_ranks} ranks. "
            "Start it as one process."
        )
    if num_ranks > 1 and experts % num_ranks != 0:
        raise UsageError(
            f"the {experts} experts of {run.folder} can't be shared evenly by {num_ranks} ranks. Start a number of "
            f"ranks that divides {experts}."
        )
    for name, flag in _REFUSED.items():
        if getattr(run.arguments, name, None):
            raise UsageError(f"{run.folder} was trained with {flag}: evaluate and generate don't build such models.")


def tokenizer_of(run: StoredRun, model_file: Path | None) -> Any:
    """Build the tokenizer that the run was trained with.

    Args:
        model_file: present path of its file; None takes the path that the checkpoint names.

    Raises:
        UsageError: its file is missing or damaged, or it does not fit the model's vocabulary.
    """
    args = argparse.Namespace(**{**vars(default_arguments()), **vars(run.arguments)})
    args.pad_vocab_size = False
    if model_file is not None:
        args.tokenizer_model = str(model_file)
    kind, path = args.tokenizer_type, args.tokenizer_model
    if kind not in ("NullTokenizer", HUGGING_FACE_TYPE, *SENTENCEPIECE_TYPES):
        args.trust_remote_code = False  # a tokenizer's folder may contain Python code
        try:
            tokenizer = megatron_builder.build_tokenizer(args)
        except Exception as error:
            raise UsageError(
                f"the checkpoint's tokenizer ({kind}, {path}) can't be built: {error}. Pass its file or folder as "
                "--tokenizer-model."
            ) from error
        return _checked(tokenizer, run)
    if kind in SENTENCEPIECE_TYPES and (path is None or not Path(path).is_file()):
        given = "--tokenizer-model" if model_file is not None else f"the checkpoint {run.folder}"
        raise UsageError(
            f"the tokenizer's file is missing: {given} names {path}. Pass the tokenizer of the data as "
            "--tokenizer-model."
        )
    settings = {field.name: getattr(args, field.name) for field in fields(TokenizerSettings)}
    if isinstance(settings["special_tokens"], list):
        settings["special_tokens"] = tuple(settings["special_tokens"]) or None
    return _checked(build_tokenizer(TokenizerSettings(**settings)), run)


def _checked(tokenizer: Any, run: StoredRun) -> Any:
    """Refuses a tokenizer that does not fit the vocabulary that the model was trained with."""
    padded = getattr(run.arguments, "padded_vocab_size", None)
    if padded is None:
        raise UsageError(f"{run.folder} does not say how large its vocabulary is; it is no training checkpoint.")
    divisor = run.arguments.make_vocab_size_divisible_by * run.arguments.tensor_model_parallel_size
    expected = -(-tokenizer.vocab_size // divisor) * divisor
    # Weights of a Hugging Face folder keep the folder's vocabulary.
    is_padded = getattr(run.arguments, "pad_vocab_size", True) and not getattr(run.arguments, "lancet_from_hf", None)
    if tokenizer.vocab_size > padded or (is_padded and expected != padded):
        raise UsageError(
            f"the tokenizer has {tokenizer.vocab_size} ids, {expected} when padded to a multiple of {divisor}; the "
            f"checkpoint {run.folder} was trained with {padded}. Pass the tokenizer that it was trained with as "
            "--tokenizer-model."
        )
    return tokenizer


def model_arguments(run: StoredRun, device: torch.device, num_ranks: int) -> argparse.Namespace:
    """Megatron's arguments for building the model of a checkpoint on ``num_ranks`` ranks that share its experts.

    Raises:
        UsageError: the model needs a GPU, and there is none.
    """
    args = argparse.Namespace(**{**vars(default_arguments()), **vars(run.arguments), **_NOT_FOR_INFERENCE})
    args.rank, args.world_size = int(os.environ.get("RANK", "0")), num_ranks
    args.data_parallel_size = num_ranks
    args.expert_model_parallel_size = num_ranks if args.num_experts else 1
    if device.type == "cpu":
        apply_cpu_settings(args)
    return args


@contextmanager
def loaded_model(run: StoredRun, device: torch.device) -> Iterator[LoadedModel]:
    """Load the model of a checkpoint on all ranks; their process groups end with the context.

    Call :func:`check_ranks` before.

    Raises:
        UsageError: the weights don't fit the model that the checkpoint's arguments describe.
    """
    refuse_missing(missing_functions(_SEAMS))
    num_ranks = number_of_ranks()
    args = model_arguments(run, device, num_ranks)
    own_attention = bool(args.multi_latent_attention) and args.transformer_impl == "local"
    with _process_groups(device, args), fused_core_attention(own_attention):
        module = build_plain_gpt(args)
        _load_weights(module, run)
        module.eval()
        yield LoadedModel(
            module=module.cuda(),
            context_length=args.seq_length,
            can_cache=not args.multi_latent_attention,
            device=device,
            rank=args.rank,
            num_ranks=num_ranks,
        )


@contextmanager
def _process_groups(device: torch.device, args: argparse.Namespace) -> Iterator[None]:
    backend = "gloo" if device.type == "cpu" else "nccl"
    if device.type != "cpu":
        torch.cuda.set_device(device)
    if args.world_size == 1:
        # A store in memory, because one process needs no network.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
    is_done = False
    try:
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=args.expert_model_parallel_size, expert_tensor_parallel_size=1
        )
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
        yield
        is_done = True
    finally:
        # NCCL waits here for all kernels of a group. After a failure they wait for rows of the rank that failed.
        if is_done or backend == "gloo":
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _load_weights(module: Any, run: StoredRun) -> None:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    wanted = module.sharded_state_dict(metadata={**(run.content or {}), "dp_cp_group": group})
    try:
        module.load_state_dict(dist_checkpointing.load({"model": wanted}, str(run.folder))["model"])
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"the weights of {run.folder} don't fit the model that its own arguments describe, or are damaged: {reason}"
        ) from error
