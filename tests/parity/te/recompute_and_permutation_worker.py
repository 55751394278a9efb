"""Stock and overlapping model with Transformer Engine's layers: what Megatron offers for these layers only."""

from collections import defaultdict
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lancet.patching import replaced
from tests.parity.gradients import gradients_worker as gradients
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.variants import MLA
from tests.te_cpu.permutation import permutation_in_torch

TE = {"te": True, "num_layers": 2, "moe_grouped_gemm": True}
NORMS = {**TE, "recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]}
LOCAL_NORMS = {**NORMS, "te": False, "recompute_modules": ["layernorm"], "moe_layer_freq": [0, 1]}
"""In front of every linear layer; with Transformer Engine's layers most are part of it."""
LATENT: dict[str, Any] = {**NORMS, **MLA, "recompute_modules": ["layernorm", "moe_act", "mla_up_proj"]}
LATENT_AND_CORE = {**LATENT, "recompute_modules": [*LATENT["recompute_modules"], "core_attn"]}
SHARED = {"moe_shared_expert_intermediate_size": 48, "moe_layer_freq": [0, 1]}
ALL_OF_MOE = {**NORMS, "recompute_modules": ["layernorm", "moe_act", "core_attn", "moe", "mlp", "shared_experts"]}
FP8 = {"bf16": True, "fp8": "e4m3", "fp8_recipe": "tensorwise", "hidden_size": 64, "ffn_hidden_size": 64}
LATENT_FP8 = {**LATENT, **FP8, "q_lora_rank": None, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 16}
DELAYED = {**LATENT_FP8, "fp8_recipe": "delayed", "recompute_modules": ["mla_up_proj"]}
RECOMPUTED: dict[str, tuple[dict[str, Any], int, dict[str, str]]] = {
    "norms/k=1": (NORMS, 1, {}),
    "norms/bf16/k=1": ({**NORMS, "bf16": True}, 1, {}),
    "norms/fp8/bf16/k=1": ({**NORMS, **FP8}, 1, {}),
    "norms/k=3": ({**NORMS, **SHARED}, 3, {}),
    "norms/fused-dw/k=3": ({**NORMS, "gradient_accumulation_fusion": True}, 3, {}),
    "norms/k=3/none": ({**NORMS, **SHARED}, 3, {"dw": "none"}),
    "norms/k=3/gate": ({**NORMS, **SHARED}, 3, {"over": "gate"}),
    "norms/k=3/experts": ({**NORMS, **SHARED}, 3, {"over": "experts", "dim": "sequence"}),
    "all-of-moe/k=3": ({**ALL_OF_MOE, **SHARED}, 3, {}),
    "local-norms/k=3": (LOCAL_NORMS, 3, {}),
    "latent/k=1": (LATENT, 1, {}),
    "latent/bf16/k=1/none": ({**LATENT, "bf16": True}, 1, {"dw": "none"}),
    "latent/fp8/bf16/k=1": (LATENT_FP8, 1, {}),
    "latent/fp8-delayed/bf16/k=1": (DELAYED, 1, {}),
    "latent/k=3": ({**LATENT, "q_lora_rank": None}, 3, {}),
    "latent/k=3/sequence": (LATENT_AND_CORE, 3, {"dim": "sequence"}),
}
"""Overrides of the transformer config, chunks, fields of the plan."""
FUSED: dict[str, tuple[dict[str, Any], int, dict[str, str]]] = {
    "fused-permutation/bf16/k=1": ({**TE, "moe_permute_fusion": True, "bf16": True}, 1, {}),
    "fused-permutation/k=3": ({**NORMS, **SHARED, "moe_permute_fusion": True}, 3, {}),
    "fused-permutation/k=3/experts": ({**TE, "moe_permute_fusion": True}, 3, {"over": "experts", "dim": "sequence"}),
}
"""Cases whose rows are permuted by Transformer Engine, by the tests' functions in place of its kernels."""
INTERPRETED: dict[str, tuple[dict[str, Any], int, dict[str, str]]] = {
    "fused-permutation/interpreted/k=2": ({**TE, "num_layers": 1, "moe_permute_fusion": True}, 2, {}),
}
"""The same by the kernels, of which Triton's interpreter needs milliseconds for each row."""
FEW_TOKENS = {"MICRO_BATCH": 2, "NUM_MICRO_BATCHES": 1, "SEQ_LENGTH": 4}
CASES = RECOMPUTED | FUSED | INTERPRETED
MEMORY_CASES = ("norms/k=3", "norms/k=3/gate", "latent/k=3/sequence")


def share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Megatron's function of this name, which it compiles when it is needed; this one copies."""
    storage = recomputed.untyped_storage()
    output.untyped_storage().resize_(storage.nbytes())
    output.untyped_storage().copy_(storage)


class Watched:
    """Memory of the tensors that recompute drops, seen where a module receives them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._storages: dict[str, list[StorageWeakRef]] = defaultdict(list)
        for name, module in model.named_modules():
            consumer = name.rpartition(".")[2]
            if consumer in ("router", "core_attention") or name.endswith(".experts.linear_fc2"):
                module.register_forward_pre_hook(lambda _, args, consumer=consumer: self._add(consumer, args))

    def _add(self, consumer: str, args: tuple[Any, ...]) -> None:
        # Core attention receives queries, keys and values; the others one tensor, and sizes.
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
        self._storages[consumer] += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    def kept_bytes(self) -> dict[str, int]:
        """Bytes that still exist, by module; Megatron's own recompute leaves storages of no bytes."""
        kept = {}
        for consumer, storages in self._storages.items():
            alive = [torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in storages if not one.expired()]
            kept[consumer] = sum(storage.nbytes() for storage in alive if storage is not None)
        return kept


def kept_after_forward(overrides: dict[str, Any], num_chunks: int | None, **plan: str) -> dict[str, int]:
    """What exists between forward and backward of a micro-batch.

    Args:
        num_chunks: None for stock.
    """
    model, config, precision = gradients.build(overrides)
    if num_chunks is None:
        ddp = gradients.wrap_with_ddp(model, config, precision, deferred=False)
    else:
        setup, stats = gradients.overlapping_model(model, gradients.plan_of(num_chunks, **plan))
        ddp = gradients.wrap_with_ddp(model, config, precision, setup.delays_weight_grads)
    watched = Watched(model)
    batch = next(gradients.micro_batches())
    loss = ddp(**{"attention_mask": None, **batch}).float().mean()
    kept = watched.kept_bytes()
    loss.backward()
    ddp.finish_grad_sync()
    if num_chunks is not None:
        gradients.close(stats)
    gradients.logged_losses()
    return kept


def with_stocks_checkpoints(stack: ExitStack) -> None:
    """Megatron's own recompute, which runs a backward pass inside the backward pass."""
    from megatron_lancet.model import moe_layer, transformer_layer

    for module in (moe_layer, transformer_layer):
        stack.enter_context(replaced(module, "outputs_dropped_in_stock", lambda *_: nullcontext()))


def compare_fused(overrides: dict[str, Any], num_chunks: int, plan: dict[str, str]) -> dict[str, Any]:
    """As :func:`gradients.compare`, with the number of our calls of each kernel."""
    from megatron.core.transformer.moe import moe_utils

    names = ("permute_with_probs", "unpermute", "sort_chunks_by_index_with_probs", "sort_chunks_by_index")
    kernels = {}

    def count(stack: ExitStack) -> None:
        for name in names:
            kernel = getattr(moe_utils, f"fused_{name}")
            kernels[name] = stack.enter_context(mock.patch.object(moe_utils, f"fused_{name}", wraps=kernel))

    found = gradients.compare(overrides, num_chunks, count, **plan)
    return found | {"kernels": {name: kernel.call_count for name, kernel in kernels.items()}}


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    from megatron.core.tensor_parallel import random

    from megatron_lancet.training.megatron.patches import dropped_outputs

    results: dict[str, Any] = {}
    with (
        dropped_outputs(),
        parallel({"expert_model_parallel_size": 2}),
        replaced(random, "_get_share_storage", lambda: share_storage),
    ):
        for name, (overrides, num_chunks, plan) in RECOMPUTED.items():
            results[name] = gradients.compare(overrides, num_chunks, **plan)
        with permutation_in_torch():
            for name, (overrides, num_chunks, plan) in FUSED.items():
                results[name] = compare_fused(overrides, num_chunks, plan)
        with ExitStack() as stack:
            for constant, value in FEW_TOKENS.items():
                stack.enter_context(replaced(gradients, constant, value))
            for name, (overrides, num_chunks, plan) in INTERPRETED.items():
                results[name] = compare_fused(overrides, num_chunks, plan)
        for name in MEMORY_CASES:
            overrides, num_chunks, plan = CASES[name]
            results[f"memory/{name}"] = {
                "ours": kept_after_forward(overrides, num_chunks, **plan),
                "stock": kept_after_forward(overrides, None),
                "ours without recompute": kept_after_forward(
                    {**overrides, "recompute_granularity": None}, num_chunks, **plan
                ),
            }
        results["stock's checkpoints"] = gradients.compare(LATENT, 2, with_stocks_checkpoints, dw="none")
    return results
