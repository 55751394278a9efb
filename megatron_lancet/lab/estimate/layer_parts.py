"""The parts of each op of a layer, from Megatron's arguments: what a chunk of a micro-batch computes and moves.

FLOP and bytes follow from the sizes; an op's small kernels count by :data:`LAUNCHES`. Sizes follow
``planning/sizes/saved_tensors.py`` and ``dry_run/parameters.py``.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lancet.lab.estimate.devices import Rate
from megatron_lancet.lab.estimate.kernels import Kernel, Part, elementwise, exchange, product
from megatron_lancet.planning.sizes.saved_tensors import FP32_BYTES, is_gated, value_bytes
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind

LAUNCHES = {
    "local": {
        OpKind.NORM: (1.0, 2.0),
        "positions": (27.0, 22.0),
        "fused positions": (5.0, 10.0),
        "router": (25.0, 16.0),
        "rows": (11.0, 4.0),
        "act": (12.0, 2.0),
        "sums": (2.0, 1.0),
        OpKind.EXPERTS: 0.0,
    },
    "transformer_engine": {
        OpKind.NORM: (1.0, 2.0),
        "positions": (4.0, 4.0),
        "router": (20.0, 12.0),
        "rows": (12.0, 4.0),
        "act": (1.0, 1.0),
        "sums": (4.0, 3.0),
        OpKind.EXPERTS: 0.25,
    },
}
"""Kernels of an op's part, forward and backward, by ``--transformer-impl``. Counts of local layers come from the
virtual GPU and this project's modules (docs/virtual_gpu.md). Counts of Transformer Engine are estimated from its
modules, whose rotary positions, activations and norms are fused. ``experts`` is the host's cost of one more expert in a
product of all, in launches: Transformer Engine launches a product for each expert from C++."""
_FUSED_ROUTER = (6.0, 4.0)
"""With ``--moe-router-fusion``."""
_FUSED_ROWS = (5.0, 2.0)
"""With ``--moe-permute-fusion``."""
_ROUTER_PASSES = (10, 6)
"""How often the router reads or writes the scores of all experts, forward and backward."""
_BACKWARD_OF_ATTENTION = 2.5
"""FLOP ratio of attention's backward to its forward: five products against two (FlashAttention)."""
_SCORE_PASSES = (6, 8)
"""How often unfused attention reads or writes its scores, forward and backward."""


@dataclass(frozen=True)
class Piece:
    """A chunk of a micro-batch on a rank.

    Attributes:
        tokens: T, before tensor parallelism shares them out.
        keys: positions that a token attends to, on average.
    """

    tokens: float
    keys: float


def num_identity_experts(args: argparse.Namespace) -> int:
    """Experts of each router that return their token, which is not sent to them."""
    return int(getattr(args, "lancet_identity_experts", 0))  # a flag of a feature, which may be deleted


class LayerParts:
    """The ops of the layers of a run."""

    def __init__(self, args: argparse.Namespace, saves_scores: bool) -> None:
        """
        Args:
            args: Megatron's arguments, validated.
            saves_scores: whether core attention is unfused.
        """
        self.args = args
        self._saves_scores = saves_scores
        self._launches = LAUNCHES["local" if args.transformer_impl == "local" else "transformer_engine"]
        self._value = value_bytes(args)
        self._tp = args.tensor_model_parallel_size
        self.sharers = self._tp if args.sequence_parallel else 1
        self.local_experts = (args.num_experts or 0) // args.expert_model_parallel_size

    def of_layer(self, kind: LayerKind, piece: Piece, rows: float) -> dict[OpKind, list[Part]]:
        """Parts of each op of a layer.

        Args:
            rows: rows that the experts of the rank receive.
        """
        found: dict[OpKind, list[Part]] = {}
        residual = self._residual(piece)
        if kind.has_attention:
            found[OpKind.ATTENTION] = list(self._attention(piece))
        if kind is LayerKind.MOE:
            found[OpKind.ATTENTION].append(self._norm(residual))
        if kind is LayerKind.MOE_ONLY:
            found[OpKind.NORM] = [self._norm(residual)]
        if kind.has_mlp:
            ffn = list(self._mlp(piece, self.args.ffn_hidden_size, "mlp"))
            found[OpKind.MLP] = [self._norm(residual), *ffn, elementwise(3 * residual, residual)]
        if kind.has_experts:
            found |= self._moe(piece, rows)
        return found

    def beside(self, piece: Piece) -> dict[OpKind, list[Part]]:
        """Parts of the embedding and of the head: final norm, output layer and loss."""
        args, residual = self.args, self._residual(piece)
        pieces = args.padded_vocab_size / self._tp
        logits = piece.tokens * pieces
        head = [
            self._norm(residual),
            self._gather(piece),
            product("output_layer", piece.tokens, args.hidden_size, pieces, self._value),
            elementwise(logits * (self._value + 3 * FP32_BYTES), logits * (self._value + FP32_BYTES), (8.0, 4.0)),
        ]
        return {OpKind.EMBEDDING: [elementwise(2 * residual, 2 * residual, (3.0, 3.0))], OpKind.HEAD: head}

    def _residual(self, piece: Piece) -> float:
        return piece.tokens / self.sharers * self.args.hidden_size * self._value

    def _of(self, name: str) -> tuple[float, float]:
        launches = self._launches[name]
        assert isinstance(launches, tuple)
        return launches

    def _norm(self, residual: float) -> Part:
        return elementwise(2 * residual, 4 * residual, self._of(OpKind.NORM), "layernorm")

    def _gather(self, piece: Piece, *modules: str) -> Part:
        """Gathers the tokens of a tensor-parallel group; reductions send as many bytes."""
        return exchange(piece.tokens * self.args.hidden_size * self._value, self._tp, *modules)

    def _attention(self, piece: Piece) -> Iterator[Part]:
        args, residual, value = self.args, self._residual(piece), self._value
        yield self._norm(residual)
        yield self._gather(piece)
        heads = args.num_attention_heads / self._tp
        if args.multi_latent_attention:
            query, out = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim), heads * args.v_head_dim
            yield from self._latent_projections(piece, heads, query)
            cost_per_pair = 2 * (query + out)
        else:
            groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
            query, keys = args.kv_channels * heads, args.kv_channels * groups / self._tp
            projected = query + 2 * keys
            yield product("self_attention.linear_qkv", piece.tokens, args.hidden_size, projected, value)
            turned = piece.tokens * (query + keys) * value
            passes = 2 if args.qk_layernorm else 1
            # As Megatron's default; without Transformer Engine it refuses this fusion on a GPU.
            is_fused = args.apply_rope_fusion and not args.rotary_interleaved and "fused positions" in self._launches
            launches = self._of("fused positions" if is_fused else "positions")
            yield elementwise(2 * passes * turned, 3 * passes * turned, launches)
            out, cost_per_pair = query, 4 * query
        pairs = piece.tokens * piece.keys
        yield self._core(pairs, heads, pairs * cost_per_pair, piece.tokens * (query + out) * 2 * value)
        yield product("self_attention.linear_proj", piece.tokens, out, args.hidden_size, value)
        yield self._gather(piece)
        yield elementwise(3 * residual, residual)

    def _core(self, pairs: float, heads: float, flops: float, num_bytes: float) -> Part:
        modules = frozenset({"core_attn"})
        if not self._saves_scores:
            forward = Kernel(Rate.ATTENTION, flops, num_bytes)
            backward = Kernel(Rate.ATTENTION, _BACKWARD_OF_ATTENTION * flops, 2 * num_bytes, 3)
            return Part(modules, (forward,), (backward,))
        # Unfused attention computes the scores of all positions, also behind the token.
        scores, (ahead, back) = 2 * pairs * heads * self._value, _SCORE_PASSES
        forwards = (Kernel(Rate.PRODUCT, 2 * flops, num_bytes, 2), Kernel(num_bytes=ahead * scores, launches=4))
        backwards = (Kernel(Rate.PRODUCT, 4 * flops, 2 * num_bytes, 4), Kernel(num_bytes=back * scores, launches=4))
        return Part(modules, forwards, backwards)

    def _latent_projections(self, piece: Piece, heads: float, query: float) -> Iterator[Part]:
        args, tokens, value = self.args, piece.tokens, self._value
        hidden, below = args.hidden_size, args.kv_lora_rank + args.qk_pos_emb_head_dim
        if args.q_lora_rank is None:
            yield product("self_attention.linear_q_proj", tokens, hidden, query, value)
        else:
            down = tokens / self.sharers
            yield product("self_attention.linear_q_down_proj", down, hidden, args.q_lora_rank, value)
            yield product("self_attention.linear_q_up_proj", tokens, args.q_lora_rank, query, value, "mla_up_proj")
        yield product("self_attention.linear_kv_down_proj", tokens / self.sharers, hidden, below, value)
        above = heads * (args.qk_head_dim + args.v_head_dim)
        yield product("self_attention.linear_kv_up_proj", tokens, args.kv_lora_rank, above, value, "mla_up_proj")
        turned = tokens * (query + above) * value
        yield elementwise(3 * turned, 3 * turned, self._of("positions"), "mla_up_proj")

    def _moe(self, piece: Piece, rows: float) -> dict[OpKind, list[Part]]:
        args, value = self.args, self._value
        own = piece.tokens / self.sharers
        sent = own * args.moe_router_topk
        width = args.hidden_size * value
        num_scores = args.num_experts + num_identity_experts(args)
        scores = own * num_scores * FP32_BYTES
        router = _FUSED_ROUTER if args.moe_router_fusion else self._of("router")
        moving = _FUSED_ROWS if args.moe_permute_fusion else self._of("rows")
        ahead, back = _ROUTER_PASSES
        found = {
            OpKind.ROUTE: [
                product("mlp.router", own, args.hidden_size, num_scores, value, "moe"),
                elementwise(ahead * scores, back * scores, router, "moe"),
            ],
            OpKind.PREPROCESS: [elementwise(2 * sent * width, (sent + own) * width, moving, "moe")],
            OpKind.EXPERTS: list(self._experts(rows)),
            OpKind.POSTPROCESS: [
                elementwise((sent + own) * width, (2 * sent + own) * width, self._of("sums"), "moe"),
                elementwise(3 * own * width, own * width),
            ],
        }
        if args.moe_shared_expert_intermediate_size:
            shared = self._mlp(piece, args.moe_shared_expert_intermediate_size, "moe", "shared_experts")
            found[OpKind.SHARED_EXPERTS] = list(shared)
        return found

    def _experts(self, rows: float) -> Iterator[Part]:
        args, value, etp = self.args, self._value, self.args.expert_tensor_parallel_size
        width, inner = args.hidden_size * value, args.moe_ffn_hidden_size / etp
        rows *= etp  # each holder of a part of an expert works on the rows of all
        gates = 2 if is_gated(args) else 1
        cost = self._launches[OpKind.EXPERTS]
        assert isinstance(cost, float)
        launches = max(1.0, cost * self.local_experts)
        yield exchange(rows * width, etp, "moe")
        if self.local_experts > 1:
            yield elementwise(2 * rows * width, 2 * rows * width, (2.0, 2.0), "moe")  # to the order of the experts
        moved, local = rows * inner * value, self.local_experts
        yield product(
            "mlp.experts.fc1", rows, args.hidden_size, inner * gates, value, "moe", num_experts=local, launches=launches
        )
        yield elementwise(moved * (gates + 1), moved * (2 * gates + 1), self._of("act"), "moe", "moe_act")
        yield product(
            "mlp.experts.fc2", rows, inner, args.hidden_size, value, "moe", num_experts=local, launches=launches
        )
        if self.local_experts > 1:
            yield elementwise(2 * rows * width, 2 * rows * width, (2.0, 2.0), "moe")
        yield exchange(rows * width, etp, "moe")

    def _mlp(self, piece: Piece, ffn: float, *modules: str) -> Iterator[Part]:
        args, value = self.args, self._value
        gates, inner, tokens = (2 if is_gated(args) else 1), ffn / self._tp, piece.tokens
        name = "mlp.shared_experts" if "moe" in modules else "mlp"
        yield self._gather(piece, *modules)
        yield product(f"{name}.linear_fc1", tokens, args.hidden_size, inner * gates, value, *modules)
        moved = tokens * inner * value
        yield elementwise(moved * (gates + 1), moved * (2 * gates + 1), self._of("act"), *modules)
        yield product(f"{name}.linear_fc2", tokens, inner, args.hidden_size, value, *modules)
        yield self._gather(piece, *modules)
