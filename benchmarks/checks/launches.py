"""Launches drawn at random from what the check keeps: axes, routers, attention, recompute, reductions."""

import random

_HEAD = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"


def random_launch(seed: int) -> list[str]:
    """Flags of a launch; Megatron takes all that are drawn.

    Left out is what is known to be wrong in the installed version: latent attention with tensor parallelism.
    """
    draw = random.Random(seed)  # noqa: S311 it draws tests, not secrets
    tensor, pipeline = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2, 4))
    context, expert = draw.choice((1, 1, 2)), draw.choice((1, 4, 8))
    words = f"{_HEAD} --num-experts {draw.choice((8, 32))} --moe-router-topk 2 --disable-bias-linear".split()
    words += f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}".split()
    words += f"--context-parallel-size {context} --expert-model-parallel-size {expert}".split()
    words += ["--expert-tensor-parallel-size", str(draw.choice((1, tensor)))]
    words += ["--sequence-parallel"] if tensor > 1 else []
    words += ["--num-virtual-stages-per-pipeline-rank", "2"] if pipeline > 1 and draw.random() < 0.5 else []
    words += _attention(draw, tensor)
    words += _router(draw)
    words += draw.choice(((), ("--use-distributed-optimizer", "--overlap-grad-reduce"), ("--overlap-grad-reduce",)))
    words += draw.choice(
        (
            [],
            ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
            ["--recompute-granularity", "selective", "--recompute-modules", "moe", "core_attn"],
        )
    )
    words += ["--calculate-per-token-loss"] if draw.random() < 0.3 else []
    words += ["--moe-shared-expert-intermediate-size", "2048"] if draw.random() < 0.4 else []
    words += ["--mtp-num-layers", "1"] if draw.random() < 0.2 else []
    words += ["--untie-embeddings-and-output-weights"] if draw.random() < 0.5 else []
    words += ["--moe-layer-freq", "([0]*1+[1]*23)"] if draw.random() < 0.4 else []
    words += ["--moe-token-dispatcher-type", "allgather" if draw.random() < 0.1 else "alltoall"]
    return words


def _attention(draw: random.Random, tensor: int) -> list[str]:
    words = [*draw.choice((["--swiglu", "--normalization", "RMSNorm"], [])), "--position-embedding-type", "rope"]
    if tensor == 1 and draw.random() < 0.4:
        return [
            *words,
            *["--multi-latent-attention", "--q-lora-rank", "512", "--kv-lora-rank", "256", "--qk-layernorm"],
        ]
    words += draw.choice(([], ["--group-query-attention", "--num-query-groups", "4"]))
    return words + (["--qk-layernorm"] if draw.random() < 0.4 else [])


def _router(draw: random.Random) -> list[str]:
    words = f"--moe-router-load-balancing-type {draw.choice(('aux_loss', 'seq_aux_loss'))}".split()
    words += f"--moe-aux-loss-coeff {draw.choice(('1e-2', '0'))}".split()
    words += ["--moe-z-loss-coeff", "1e-3"] if draw.random() < 0.4 else []
    words += draw.choice(
        (
            [],
            ["--moe-router-pre-softmax"],
            ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"],
            ["--moe-router-num-groups", "4", "--moe-router-group-topk", "2"],
        )
    )
    return words + (["--moe-router-dtype", "fp32"] if draw.random() < 0.5 else [])
