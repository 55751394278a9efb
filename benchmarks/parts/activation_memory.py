"""Peak activation memory of one micro-batch, forward and backward: stock against the overlapping block.

    torchrun --nproc-per-node 2 -m benchmarks.parts.activation_memory --output results.json

The storage of every tensor that an op returns is followed until it is released, so the figure is exact and free of the
allocator's rounding. Weights and gradient buffers exist before and are not counted; what deferred weight gradients keep
alive is.
"""

import argparse
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.parts.frame import megatron_ranks, new_parser, write_result
from benchmarks.training_step.live_memory import LiveMemory

VOCAB = 1024
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
CUTS = [("off", 1, "batch"), ("k=1", 1, "batch")] + [
    (f"k={num_chunks} {dim}", num_chunks, dim) for dim in ("batch", "sequence") for num_chunks in (2, 4)
]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="of the model (4)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (256)")
    parser.add_argument("--seq-length", type=int, default=512, help="tokens of a sample (512)")
    parser.add_argument("--micro-batch", type=int, default=4, help="samples (4)")
    return parser.parse_args()


def build(args: argparse.Namespace, recompute: dict[str, Any]) -> Any:
    """A GPT-MoE of Megatron's, without dropout."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=4,
        ffn_hidden_size=4 * args.hidden,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",  # noqa: S106
        expert_model_parallel_size=2,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        **recompute,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="LayerNorm")
    return GPTModel(config, spec, vocab_size=VOCAB, max_sequence_length=args.seq_length), config


def peak_mb(args: argparse.Namespace, cut: str, num_chunks: int, dim: str, recompute: dict[str, Any]) -> float:
    """Peak memory of the second micro-batch beside weights and gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_lancet.runtime.comm_stats import CommStats
    from megatron_lancet.schedule.plan import ChunkDim, fixed_plan
    from megatron_lancet.training.overlap_setup import OverlapSetup

    model, config = build(args, recompute)
    if cut != "off":
        plan = fixed_plan(num_chunks, chunk_dim=ChunkDim(dim))
        # The fused attention everywhere: what is compared is the cutting, not the kernel.
        OverlapSetup(plan, torch.device("cpu"), CommStats(torch.device("cpu")), timedelta(minutes=5), sdpa=True)(
            [model]
        )
    else:
        from megatron_lancet.model.attention.switchable import SwitchableAttention

        for layer in model.decoder.layers:
            SwitchableAttention(layer.self_attention, recomputed=False).use_prefixed()
    DistributedDataParallel(config, DistributedDataParallelConfig(delay_wgrad_compute=cut != "off"), model)
    tokens = torch.randint(VOCAB, (args.micro_batch, args.seq_length))
    positions = torch.arange(args.seq_length).expand(args.micro_batch, -1)

    def micro_batch() -> None:
        model(tokens, positions, None, labels=tokens).float().mean().backward()

    micro_batch()  # makes gradients, buffers and connections
    known = [tensor for p in model.parameters() for tensor in (p, p.main_grad)]
    memory = LiveMemory(known)
    with memory.watches_this_thread():
        micro_batch()
    return memory.peak_bytes / 1e6


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    with megatron_ranks():
        if dist.get_world_size() != 2:
            raise SystemExit(f"error: expected 2 ranks, found {dist.get_world_size()}: torchrun --nproc-per-node 2 ...")
        is_first = dist.get_rank() == 0
        peaks = {
            name: {cut[0]: peak_mb(args, *cut, recompute) for cut in CUTS} for name, recompute in RECOMPUTE.items()
        }
    if is_first:
        print(f"{'MB (of stock)':16}" + "".join(f"{name:>18}" for name in RECOMPUTE))
        for cut, *_ in CUTS:
            cells = [(peaks[name][cut], peaks[name][cut] / peaks[name]["off"]) for name in RECOMPUTE]
            print(f"{cut:16}" + "".join(f"{mb:10.1f} ({ratio:.2f})" for mb, ratio in cells))
        shape = {key: value for key, value in vars(args).items() if key != "output"}
        write_result(args.output, "activation_memory", {"shape": shape, "peak_mb": peaks})


if __name__ == "__main__":
    main()
