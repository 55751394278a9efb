"""Peak activation memory of one micro-batch, forward and backward: stock against the overlapping block.

    torchrun --nproc-per-node 2 -m benchmarks.parts.activation_memory --output results.json

The storage of every tensor that an op returns is followed until it is released, so the figure is exact and free of the
allocator's rounding. Weights and gradient buffers exist before and are not counted; what deferred weight gradients keep
alive is. What lives at once also depends on when messages arrive, so the figure is the median of several micro-batches,
each begun together.

Then the same with eight experts and top-4 under full recompute, where ours may send a token once to each rank instead
of once to each of its experts, and keeps the fewer received rows.
"""

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.parts.frame import megatron_ranks, new_parser, parsed, write_result
from benchmarks.training_step.live_memory import LiveMemory

VOCAB = 1024
MICRO_BATCHES = 3
"""That are measured for each figure."""
TOP_2 = {"num_moe_experts": 4, "moe_router_topk": 2}
TOP_4 = {"num_moe_experts": 8, "moe_router_topk": 4}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
CUTS = [("off", 1, "batch"), ("k=1", 1, "batch")] + [
    (f"k={num_chunks} {dim}", num_chunks, dim) for dim in ("batch", "sequence") for num_chunks in (2, 4)
]
TOP_4_CUTS = {"plain": CUTS[:4], "dedup": CUTS[1:4]}
"""By what dispatches carry; stock has the plain one only."""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="of the model (4)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (256)")
    parser.add_argument("--seq-length", type=int, default=512, help="tokens of a sample (512)")
    parser.add_argument("--micro-batch", type=int, default=4, help="samples (4)")
    return parsed(parser, "activation_memory")


def build(args: argparse.Namespace, settings: Mapping[str, Any]) -> Any:
    """A GPT-MoE of Megatron's, without dropout.

    Args:
        settings: further ones of Megatron's configuration.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)  # all have the same weights and tokens, so the same rows
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=4,
        ffn_hidden_size=4 * args.hidden,
        moe_token_dispatcher_type="alltoall",  # noqa: S106
        expert_model_parallel_size=2,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        **settings,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="LayerNorm")
    return GPTModel(config, spec, vocab_size=VOCAB, max_sequence_length=args.seq_length), config


def peak_mb(
    args: argparse.Namespace, cut: tuple[str, int, str], settings: Mapping[str, Any], dispatch: str = "plain"
) -> float:
    """Peak memory of a micro-batch next to weights and gradients, in MB.

    Args:
        cut: name, number of chunks and the dimension along which they are cut.
        settings: see :func:`build`.
        dispatch: what all-to-alls of ours carry.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_lancet.runtime.comm_stats import CommStats
    from megatron_lancet.schedule.plan import ChunkDim, Dispatch, fixed_plan
    from megatron_lancet.training.overlap_setup import OverlapSetup

    model, config = build(args, settings)
    name, num_chunks, dim = cut
    if name != "off":
        plan = replace(fixed_plan(num_chunks, chunk_dim=ChunkDim(dim)), dispatch=Dispatch.known()[dispatch])
        # The fused attention everywhere: what is compared is the cutting, not the kernel.
        OverlapSetup(plan, torch.device("cpu"), CommStats(torch.device("cpu")), timedelta(minutes=5), sdpa=True)(
            [model]
        )
    else:
        from megatron_lancet.model.attention.switchable import SwitchableAttention

        for layer in model.decoder.layers:
            SwitchableAttention(layer.self_attention, recomputed=False).use_prefixed()
    DistributedDataParallel(config, DistributedDataParallelConfig(delay_wgrad_compute=name != "off"), model)
    tokens = torch.randint(VOCAB, (args.micro_batch, args.seq_length))
    positions = torch.arange(args.seq_length).expand(args.micro_batch, -1)

    def micro_batch() -> None:
        model(tokens, positions, None, labels=tokens).float().mean().backward()

    micro_batch()  # makes gradients, buffers and connections
    known = [tensor for p in model.parameters() for tensor in (p, p.main_grad)]
    peaks_mb = []
    for _ in range(MICRO_BATCHES):
        dist.barrier()
        memory = LiveMemory(known)
        with memory.watches_this_thread():
            micro_batch()
        peaks_mb.append(memory.peak_bytes / 1e6)
    return statistics.median(peaks_mb)


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    with megatron_ranks():
        if dist.get_world_size() != 2:
            raise SystemExit(f"error: expected 2 ranks, found {dist.get_world_size()}: torchrun --nproc-per-node 2 ...")
        is_first = dist.get_rank() == 0
        peaks = {
            name: {cut[0]: peak_mb(args, cut, {**TOP_2, **recompute}) for cut in CUTS}
            for name, recompute in RECOMPUTE.items()
        }
        top_4_peaks = {
            dispatch: {cut[0]: peak_mb(args, cut, {**TOP_4, **RECOMPUTE["full"]}, dispatch) for cut in cuts}
            for dispatch, cuts in TOP_4_CUTS.items()
        }
    if is_first:
        print_table("recompute", peaks, {name: column["off"] for name, column in peaks.items()})
        print_table("top-4, dispatch", top_4_peaks, dict.fromkeys(top_4_peaks, top_4_peaks["plain"]["off"]))
        shape = {key: value for key, value in vars(args).items() if key not in ("output", "origin")}
        result = {"shape": shape, "peak_mb": peaks, "top_4_peak_mb": top_4_peaks}
        write_result(args, result)


def print_table(title: str, peaks: Mapping[str, Mapping[str, float]], stock_mb: Mapping[str, float]) -> None:
    """A line for each way to cut the micro-batch.

    Args:
        title: what tells the columns apart.
        peaks: in MB, by column and cut.
        stock_mb: of each column.
    """
    print(f"{title:16}" + "".join(f"{name:>18}" for name in peaks) + "  MB (of stock)")
    for cut in {cut: None for column in peaks.values() for cut in column}:
        cells = [
            f"{column[cut]:10.1f} ({column[cut] / stock_mb[name]:.2f})" if cut in column else " " * 17
            for name, column in peaks.items()
        ]
        print(f"{cut:16}" + " ".join(cells))


if __name__ == "__main__":
    main()
