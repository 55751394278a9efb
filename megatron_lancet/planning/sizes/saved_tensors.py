"""The tensors that autograd saves in a layer, from Megatron's arguments.

Counted are tensors with fused attention (or the score matrices without it), for balanced routing. Workspaces, buffers
of NCCL and of the dispatcher, and fragmentation are not counted. Tensors in fp8 count as bf16.

Legend: T tokens of a micro-batch on this rank, s ranks that share the residual stream (tensor parallel size under
sequence parallelism, else 1).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lancet.schedule.layers import LayerKind

FP32_BYTES = 4


@dataclass(frozen=True)
class Saved:
    """A tensor that the backward pass of a layer needs.

    Attributes:
        num_bytes: bytes on a rank, for one micro-batch.
        module: name in ``--recompute-modules`` with which the tensor is recomputed; empty if it is always kept.
        also: a second such name.
        is_kept_by_plans: whether a plan keeps it even if its module is recomputed: a plan recomputes what lies between
            two collectives, and repeats no message.
    """

    num_bytes: float
    module: str = ""
    also: str = ""
    is_kept_by_plans: bool = False


def layer_tensors(args: argparse.Namespace, kind: LayerKind, saves_scores: bool) -> Iterator[Saved]:
    """Yields the tensors that a layer saves for one micro-batch; small ones are left out."""
    residual = residual_bytes(args)
    num_parts = kind.has_attention + (kind.has_experts or kind.has_mlp)
    yield Saved(num_parts * residual)  # inputs of the norms
    # Their outputs; elsewhere layers of Transformer Engine have a norm inside the linear layer that reads it.
    if kind.has_attention:
        yield Saved(residual, "layernorm" if args.multi_latent_attention else "")
    if kind.has_experts or kind.has_mlp:
        yield Saved(residual, "layernorm" if kind.has_experts else "")
    if args.hidden_dropout > 0:
        yield Saved(num_parts * residual / value_bytes(args))  # masks of one byte
    if kind.has_attention:
        yield from _latent_attention(args) if args.multi_latent_attention else _attention(args)
    if kind.has_attention and saves_scores:
        # Softmax, and with dropout its mask and result: [samples, heads, positions of this rank, positions].
        heads = args.num_attention_heads / args.tensor_model_parallel_size
        per_score = value_bytes(args) + (1 + value_bytes(args) if args.attention_dropout > 0 else 0)
        yield Saved(tokens(args) * heads * args.seq_length * per_score, "core_attn")
    if kind.has_experts:
        yield from _moe(args)
    if kind.has_mlp:
        for saved in _mlp(args, tokens(args), args.ffn_hidden_size, args.tensor_model_parallel_size):
            yield Saved(saved.num_bytes, "mlp")


def expert_row_bytes(args: argparse.Namespace) -> float:
    """Bytes that a row of the experts keeps from forward to backward: its token, and the tensors inside the expert.

    A recomputed expert keeps the token only.

    Args:
        args: Megatron's arguments, validated.
    """
    token = (args.moe_latent_size or args.hidden_size) * value_bytes(args)
    if args.recompute_granularity == "full" or "moe" in (args.recompute_modules or ()):
        return float(token)
    inside = _mlp(args, 1, args.moe_ffn_hidden_size, args.expert_tensor_parallel_size)
    return token + sum(saved.num_bytes for saved in inside)


def value_bytes(args: argparse.Namespace) -> int:
    """Bytes of a value of the model's type."""
    return 2 if args.bf16 or args.fp16 else FP32_BYTES


def tokens(args: argparse.Namespace) -> float:
    """Tokens of a micro-batch on this rank."""
    return args.micro_batch_size * args.seq_length / args.context_parallel_size


def residual_bytes(args: argparse.Namespace) -> float:
    """Size of a tensor in the residual stream: [T / s, hidden size]."""
    ranks = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return tokens(args) * args.hidden_size * value_bytes(args) / ranks


def _attention(args: argparse.Namespace) -> Iterator[Saved]:
    """Queries, keys, values, and the output of core attention."""
    per_value = tokens(args) * value_bytes(args) / args.tensor_model_parallel_size
    query = args.kv_channels * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    yield Saved(per_value * (query + 2 * args.kv_channels * groups))
    yield Saved(per_value * query)


def is_gated(args: argparse.Namespace) -> bool:
    """Whether the first layer of an MLP has a gate of the same size next to it."""
    return args.swiglu or args.quick_geglu


def _latent_attention(args: argparse.Namespace) -> Iterator[Saved]:
    """Compressed queries and keys before and after their norms, their projections, and the output."""
    per_value = tokens(args) * value_bytes(args)
    ranks = args.tensor_model_parallel_size if args.sequence_parallel else 1
    compressed = (args.q_lora_rank or 0) + args.kv_lora_rank
    yield Saved(per_value * (compressed + args.qk_pos_emb_head_dim) / ranks)
    yield Saved(per_value * compressed / ranks, "mla_up_proj")  # after their norms
    heads = args.num_attention_heads / args.tensor_model_parallel_size
    query = args.qk_head_dim + args.qk_pos_emb_head_dim
    yield Saved(per_value * heads * (2 * query + args.v_head_dim), "mla_up_proj")
    yield Saved(per_value * heads * args.v_head_dim)


def _mlp(args: argparse.Namespace, rows: float, ffn: int, num_shards: int) -> Iterator[Saved]:
    """Tensors between the two linear layers, before and after the activation function, with unfused gates' factors."""
    inner = rows * ffn * value_bytes(args) / num_shards
    fused = args.bias_swiglu_fusion if args.swiglu else True
    yield Saved(inner * ((2 if fused else 3) if is_gated(args) else 1))
    yield Saved(inner)


def _moe(args: argparse.Namespace) -> Iterator[Saved]:
    """The router's scores, the rows that the experts received, tensors inside the experts, and the shared expert."""
    ranks = args.tensor_model_parallel_size if args.sequence_parallel else 1
    yield Saved(2 * tokens(args) / ranks * args.num_experts * FP32_BYTES, "moe", is_kept_by_plans=True)
    rows = tokens(args) / ranks * args.moe_router_topk * args.expert_tensor_parallel_size
    rows *= args.moe_expert_capacity_factor or 1
    row_bytes = (args.moe_latent_size or args.hidden_size) * value_bytes(args)
    yield Saved(rows * row_bytes, "moe", is_kept_by_plans=True)
    before, after = _mlp(args, rows, args.moe_ffn_hidden_size, args.expert_tensor_parallel_size)
    yield Saved(before.num_bytes, "moe")
    yield Saved(after.num_bytes, "moe", "moe_act")
    shared = args.moe_shared_expert_intermediate_size
    if shared:
        for saved in _mlp(args, tokens(args), shared, args.tensor_model_parallel_size):
            yield Saved(saved.num_bytes, "moe", "shared_experts")
