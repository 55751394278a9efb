"""Everything we assume of Megatron's training code, and every change we make to it, in one place.

What concerns checkpoints, and the end of a run that saves one, is next door in ``checkpoint_patches.py``.

The changes are contexts: they hold while training runs and are undone afterwards. The assumptions are checked at
start, so that another version of Megatron fails with a sentence and not in the middle of a step.
"""

import argparse
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import utils
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import distrib_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import torch_norm
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import arguments, global_vars, training
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import GPTModelBuilder
from megatron.training.utils import common_utils

from megatron_lancet.errors import UsageError
from megatron_lancet.model.attention import SdpaAttention
from megatron_lancet.patching import wrapped
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.training.megatron import checkpoint_patches, grad_reduction
from megatron_lancet.training.megatron.norm import sequence_parallel_norm

_SEAMS: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (GPTModel, "forward", ("input_ids", "position_ids", "attention_mask", "labels", "loss_mask")),
    (TransformerBlock, "forward", ("hidden_states", "attention_mask", "rotary_pos_emb", "attention_bias")),
    (TransformerLayer, "_forward_attention", ("hidden_states", "attention_mask", "rotary_pos_emb", "attention_bias")),
    (TransformerLayer, "_forward_mlp", ("hidden_states",)),
    (DotProductAttention, "__init__", ("config", "pg_collection")),
    (
        DotProductAttention,
        "forward",
        ("query", "key", "value", "attention_mask", "attention_bias", "packed_seq_params"),
    ),
    (RotaryEmbedding, "forward", ("max_seq_len", "offset")),
    (LocalSpecProvider, "core_attention", ()),
    (mappings, "gather_from_sequence_parallel_region", ("input_", "group")),
    (utils, "get_batch_on_this_cp_rank", ("batch", "is_hybrid_cp", "cp_group")),
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
    (TopKRouter, "_maintain_float32_expert_bias", ()),
    (moe_utils, "permute", ("tokens", "routing_map", "probs", "num_out_tokens")),
    (moe_utils, "unpermute", ("permuted_tokens", "sorted_indices", "restore_shape", "routing_map")),
    (moe_utils, "sort_chunks_by_idxs", ("input", "split_sizes", "sorted_idxs", "probs")),
    (moe_utils, "compute_routing_scores_for_aux_loss", ("logits", "topk", "score_function", "fused")),
    (ColumnParallelLinear, "_forward_impl", ("input", "weight")),
    (RowParallelLinear, "_forward_impl", ("input", "weight")),
    (DistributedDataParallel, "_make_backward_post_hook", ("param",)),
    (DistributedDataParallel, "__init__", ("ddp_config",)),
    (training, "train", ()),
    (distrib_optimizer.DistributedOptimizer, "state_dict", ()),
    (distrib_optimizer.DistributedOptimizer, "load_state_dict", ("state_dict",)),
    (training, "train_step", ("forward_step_func", "data_iterator", "model")),
    (training, "is_last_rank", ()),
    (training, "train", ()),
    (training, "get_signal_handler", ()),
    (global_vars, "get_tensorboard_writer", ()),
    (common_utils, "is_last_rank", ()),
    (arguments, "add_megatron_arguments", ("parser",)),
    (training, "pretrain", ("cfg_container", "train_valid_test_dataset_provider", "model_type", "forward_step_func")),
    (token_dispatcher, "gather_from_sequence_parallel_region", ("input_",)),
)
"""Functions that we call, override or wrap, with the parameters that we count on."""

_TWO_SLICES_PER_RANK = (
    (utils, "_get_batch_on_this_cp_rank_per_sequence_balancing"),
    (rope_utils, "get_pos_emb_on_this_cp_rank"),
)
"""Where Megatron cuts sequences for context parallelism as ``model/context_parallel.py`` expects."""


def check_seams() -> None:
    """
    Raises:
        UsageError: Megatron lacks a function or a parameter that we use; names all of them.
    """
    missing = missing_functions(_SEAMS + checkpoint_patches.SEAMS)
    ddp_source = inspect.getsource(DistributedDataParallel.__init__)
    for protocol in ("skip_backward_post_hook", "register_wgrad_accumulation_and_reduce_hooks"):
        if protocol not in ddp_source:
            missing.append(f"DistributedDataParallel's {protocol}")
    missing += grad_reduction.missing_seams()
    for module, name in _TWO_SLICES_PER_RANK:
        if "2 * cp_size - cp_rank - 1" not in inspect.getsource(getattr(module, name, module)):
            missing.append(f"the cut of a sequence into two slices per rank in {module.__name__}.{name}")
    if not checkpoint_patches.tracker_is_written_where_expected():
        missing.append("the place in checkpointing.save_checkpoint that writes the tracker file")
    refuse_missing(missing)


def missing_functions(seams: Iterable[tuple[Any, str, tuple[str, ...]]]) -> list[str]:
    """Which of these functions and parameters Megatron lacks: (owner, name, parameters)."""
    missing = []
    for owner, name, parameters in seams:
        function = getattr(owner, name, None)
        where = f"{owner.__name__}.{name}"
        if function is None:
            missing.append(where)
            continue
        # jit-fused functions are compiled wrappers: the signature is that of the function inside.
        known = inspect.signature(inspect.unwrap(function)).parameters
        missing += [f"{where}({parameter})" for parameter in parameters if parameter not in known]
    return missing


def refuse_missing(missing: Sequence[str]) -> None:
    """
    Raises:
        UsageError: anything is missing.
    """
    if missing:
        raise UsageError(
            "this megatron-core differs from the versions that we know: it lacks " + ", ".join(missing) + ". "
            "Install megatron-core 0.19.2."
        )


def default_arguments() -> dict[str, Any]:
    """Megatron's arguments, all at their defaults."""
    return vars(arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([]))


def build_plain_gpt(args: argparse.Namespace) -> torch.nn.Module:
    """Megatron's GPT for a set of arguments, without DDP. The process groups must exist.

    Raises:
        UsageError: Megatron refuses the arguments.
    """
    try:
        config = gpt_config_from_args(args)
        config.finalize()
    except (AssertionError, ValueError, ImportError) as error:
        raise UsageError(f"Megatron can't build this model: {error}") from error
    module: torch.nn.Module = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    return Float16Module(config.transformer, module) if args.fp16 or args.bf16 else module


def sequence_parallel_with_torch_norm() -> AbstractContextManager[None]:
    """Lets the norm of the local spec run under sequence parallelism, where stock refuses it without apex."""

    def wrap(stock_new: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock_new)
        def new(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
            if config.sequence_parallel:
                return sequence_parallel_norm(config, hidden_size, eps)
            return stock_new(cls, config, hidden_size, eps, **kwargs)

        return new

    return wrapped(torch_norm.WrappedTorchNorm, "__new__", wrap)


def core_attention_without_te(needed: bool) -> AbstractContextManager[None]:
    """Lets the local spec build what stock's own core attention can't: multi-latent attention, context parallelism."""
    if not needed:
        return nullcontext()
    return wrapped(LocalSpecProvider, "core_attention", lambda stock: lambda self: SdpaAttention)


@contextmanager
def resumable_distributed_optimizer() -> Iterator[None]:
    """Lets the distributed optimizer resume with torch's Adam, where stock asserts without apex or TE.

    Stock reads the step count from optimizer state that does not exist yet; copies into fp32 parameters, which require
    gradients, with autograd on; and overwrites torch's per-parameter step counters, one tensor that all share, by
    those of before loading. The saved count survives in the parameter groups.
    """
    if distrib_optimizer.HAVE_APEX_OR_TE:
        yield
        return

    def with_state(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
            _make_adam_state(self.optimizer)
            return stock(self, *args, **kwargs)

        return state_dict

    def with_step_counts(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                result = stock(self, *args, **kwargs)
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))
            return result

        return load_state_dict

    optimizer = distrib_optimizer.DistributedOptimizer
    with wrapped(optimizer, "state_dict", with_state), wrapped(optimizer, "load_state_dict", with_step_counts):
        yield


def _make_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that torch's Adam would make in its first step, unless there is any."""
    if optimizer.state or not isinstance(optimizer, torch.optim.Adam):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


@contextmanager
def measured_stock_communication(stats: CommStats) -> Iterator[None]:
    """Times stock's blocking all-to-alls and count exchanges; their arguments and results pass through."""

    def timed_all_to_all(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def all_to_all_single(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            stats.add("num_all_to_alls", 1)
            with stats.waiting("exposed_ms", "all_to_all_ms"):
                return stock(output, input, *args, **kwargs)

        return all_to_all_single

    def timed_counts(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def gather(input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if input_.requires_grad:  # rows, gathered over the tensor-parallel group
                return stock(input_, *args, **kwargs)
            with stats.waiting("counts_exposed_ms"):
                return stock(input_, *args, **kwargs)

        return gather

    with (
        wrapped(torch.distributed, "all_to_all_single", timed_all_to_all),
        wrapped(token_dispatcher, "gather_from_sequence_parallel_region", timed_counts),
    ):
        yield


def observed_train_step(observe: Callable[[Callable[[], Any]], Any]) -> AbstractContextManager[None]:
    """Calls ``observe`` with each of Megatron's training steps; it runs the step and returns its result."""

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            return observe(lambda: stock(*args, **kwargs))

        return train_step

    return wrapped(training, "train_step", wrap)


def after_training(report: Callable[[], None]) -> AbstractContextManager[None]:
    """Calls ``report`` after Megatron's last training step, also where an exit condition ends the process there."""

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def train(*args: Any, **kwargs: Any) -> Any:
            try:
                result = stock(*args, **kwargs)
            except SystemExit as request:
                if request.code is not None:  # the end of the loop gives a status
                    report()
                raise
            report()
            return result

        return train

    return wrapped(training, "train", wrap)


def late_weight_grads() -> AbstractContextManager[None]:
    """Lets DDP expect weight gradients that come after autograd is done, in runs whose DDP settings we don't make."""

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def init(*args: Any, **kwargs: Any) -> None:
            signature.bind(*args, **kwargs).arguments["ddp_config"].delay_wgrad_compute = True
            stock(*args, **kwargs)

        return init

    return wrapped(DistributedDataParallel, "__init__", wrap)
