"""How much of a step tensor parallelism's gathers and scatters take, and what hiding all of them could gain: predicted.

    python -m benchmarks.tensor_parallel > benchmarks/tensor_parallel_predicted.txt

No GPU, about a minute on an idle core. Recipes are Megatron-Bridge 0.6.2's for H100, in bf16, without multi-token
prediction. Each is estimated twice (``lancet estimate``): as it is, and with gathers and scatters that cost nothing.
The last column is the step of the fastest plan over its step with free gathers: an upper bound, since nothing hides all
of them. A backward's second gather, for the weight gradient, runs beside a product and counts nothing.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from megatron_lancet.lab.estimate.cluster_text import ClusterChoice
from megatron_lancet.lab.estimate.command import estimate_launch
from megatron_lancet.lab.estimate.estimate import Estimate, fastest
from megatron_lancet.lab.estimate.kernels import exchange
from megatron_lancet.lab.estimate.layer_parts import LayerParts
from megatron_lancet.lab.launch.launch import Launch
from megatron_lancet.lab.what_if.forecast import Routing
from megatron_lancet.patching import replaced
from megatron_lancet.report.tables import right_aligned

_COMMON = (
    "--bf16 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --attention-dropout 0 "
    "--hidden-dropout 0 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --moe-router-dtype fp32 --moe-grouped-gemm --moe-token-dispatcher-type "
    "alltoall --transformer-impl transformer_engine --sequence-parallel --expert-tensor-parallel-size 1 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --tokenizer-type NullTokenizer "
    "--mock-data --train-iters 10 --lr 1e-4 --eval-interval 10"
)
_QWEN3 = "--group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --num-experts 128 "
_QWEN3 += "--moe-router-topk 8 --moe-router-load-balancing-type aux_loss --vocab-size 151936"
_30B = f"{_QWEN3} --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
_30B += "--moe-ffn-hidden-size 768"
_235B = f"{_QWEN3} --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 "
_235B += "--moe-ffn-hidden-size 1536 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
_VIRTUAL = "--num-layers-per-virtual-pipeline-stage 3"
_LATENT = "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
_LATENT += "--v-head-dim 128 --qk-layernorm --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 "
_LATENT += "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 "
_LATENT += "--moe-router-score-function sigmoid --moe-router-load-balancing-type seq_aux_loss "
_LATENT += "--recompute-granularity selective --recompute-modules mla_up_proj mlp --pipeline-model-parallel-layout"
_32_STAGES, _16_STAGES = "Et|(tt|)*30L", "Etttt|(tttt|)*14tL"
_V3 = "--num-attention-heads 128 --num-experts 256 --moe-layer-freq [0]*3+[1]*58 --vocab-size 129280"
_K2 = "--num-attention-heads 64 --num-experts 384 --moe-layer-freq [0]+[1]*60 --vocab-size 163840"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

RECIPES = {
    "Qwen3-30B, TP4 PP2 EP4": (1, f"{_30B} {_FULL} --global-batch-size 256", (4, 2, 4)),
    "Qwen3-235B, TP2 PP8 EP32": (32, f"{_235B} {_VIRTUAL} --global-batch-size 8192", (2, 8, 32)),
    "Qwen3-235B, TP4 PP16 EP8": (32, f"{_235B} --global-batch-size 8192", (4, 16, 8)),
    "DeepSeek-V3, TP2 PP8 EP64": (128, f"{_LATENT} {_32_STAGES} {_V3} --global-batch-size 16384", (2, 8, 64)),
    "Kimi K2, TP2 PP16 EP32": (64, f"{_LATENT} {_16_STAGES} {_K2} --global-batch-size 4096", (2, 16, 32)),
    "Kimi K2, TP8 PP16 EP64": (128, f"{_LATENT} {_32_STAGES} {_K2} --global-batch-size 8192", (8, 16, 64)),
}
"""Nodes, flags, and tensor, pipeline and expert parallel sizes, by name."""
LINKS = {"NVLink": "nvlink", "PCIe 5": "512"}
"""Inside a node, by name, as ``--cluster`` has them."""


@dataclass(frozen=True)
class Row:
    """A recipe on a cluster; each range is over the corners of ``lancet estimate``.

    Attributes:
        share: of gathers and scatters in stock's step.
        plan: the fastest plan.
        speedup: of that plan over stock.
        hidden: speed-up that free gathers and scatters would add to it.
    """

    recipe: str
    link: str
    share: tuple[float, float]
    plan: str
    speedup: tuple[float, float]
    hidden: tuple[float, float]


def row(recipe: str, link: str) -> Row:
    """Estimates a recipe with gathers as they are, and with free ones."""
    nodes, flags, (tensor, pipeline, expert) = RECIPES[recipe]
    sizes = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} "
    sizes += f"--expert-model-parallel-size {expert}"
    words = f"{_COMMON} {flags} {sizes}".split()
    cluster = ClusterChoice.parse(f"{nodes}x8:h100,{LINKS[link]},400g")

    def found(free: bool) -> Sequence[Estimate]:
        nothing = lambda *_: exchange(0.0, tensor)  # noqa: E731
        with replaced(LayerParts, "_gather", nothing) if free else nullcontext():
            return estimate_launch(Launch(words, None, {}), cluster, Routing("even")).found

    found_as_is, found_free = found(free=False), found(free=True)
    best = fastest(found_as_is[1:])
    same = next(one for one in found_free if one.candidate.name == best.candidate.name)
    ratios = found_free[0].speedup(found_as_is[0])
    share = (1 - 1 / ratios[0], 1 - 1 / ratios[1])
    return Row(recipe, link, share, best.candidate.name, best.speedup(found_as_is[0]), same.speedup(best))


def main() -> None:
    """Prints the table."""
    logging.disable(logging.WARNING)
    rows = [row(recipe, link) for link in LINKS for recipe in RECIPES]
    lines = [["recipe", "link", "gathers of stock's step", "fastest plan", "times stock", "all hidden: times the plan"]]
    for one in rows:
        share = f"{100 * one.share[0]:.0f} to {100 * one.share[1]:.0f} %"
        speedup, hidden = (f"{low:.2f} to {high:.2f}" for low, high in (one.speedup, one.hidden))
        lines.append([one.recipe, one.link, share, one.plan, speedup, hidden])
    print("predicted by lancet estimate, not measured")
    print("\n".join(right_aligned(lines)))


if __name__ == "__main__":
    main()
