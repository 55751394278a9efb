"""Trains a small GPT-MoE for longer, with a plan that is found while it trains, on the CPU or on GPUs.

It uses two CPU ranks or the available GPUs, and saves, resumes and validates. Corpus and tokenizer come from
``data.py``.
"""

import json
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo.data import num_cores, prepare, write_sample
from benchmarks.demo.folder import REPOSITORY, Folder, open_folder, shown, write_json
from benchmarks.demo.training_log.loss_curve import LossCurve, write_png
from benchmarks.demo.training_log.train_log import RunLog, results_text, tail
from benchmarks.demo.training_log.training_process import Progress, running, say
from megatron_lancet.errors import UsageError

SAMPLES_PER_RANK = 8
"""Micro-batch size, enough for two chunks."""

MODEL_FLAGS = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 352 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --init-method-std 0.04 --num-experts 8 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"
)
TRAINING_FLAGS = (
    "--attention-dropout 0 --hidden-dropout 0 --lr 1.5e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.04 --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95 "
    "--split 95,5,0 --eval-iters 30 --log-interval 1 --num-workers 0"
)
GPU_FLAGS = (
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --attention-backend unfused"
)
"""Plain kernels, which need neither Transformer Engine nor apex; a CPU run has no others."""

NUM_CPU_RANKS = 2
MAX_RANKS = 8


@dataclass(frozen=True)
class Layout:
    """Hardware layout of the training.

    Attributes:
        num_ranks: number of processes: one per GPU, or two on the CPU.
        expert_parallel_size: ranks that share the experts of a layer.
        description: text for the user.
        flags: Megatron's flags for this hardware.
    """

    num_ranks: int
    expert_parallel_size: int
    description: str
    flags: str = ""


def choose_layout(num_gpus: int) -> Layout:
    """Selects two CPU ranks without a GPU, one GPU, or an even number of GPUs, at most eight."""
    if num_gpus == 0:
        return Layout(NUM_CPU_RANKS, 2, f"{NUM_CPU_RANKS} CPU ranks, expert parallel size 2")
    if num_gpus == 1:
        return Layout(1, 1, "1 GPU; without a second one there is no communication to overlap", GPU_FLAGS)
    num_ranks = min(num_gpus, MAX_RANKS) // 2 * 2
    return Layout(num_ranks, 2, f"{num_ranks} GPUs, expert parallel size 2", GPU_FLAGS)


def last_value(flags: Sequence[str], name: str) -> str:
    """Returns the value of the last occurrence of a flag in ``flags``."""
    words = " ".join(flags).replace("=", " ").split()
    return words[len(words) - words[::-1].index(name)]


def training_flags(folder: Folder, layout: Layout, num_iterations: int, extra: Sequence[str]) -> list[str]:
    """Returns the flags of both parts of the training, which are one run with one schedule."""
    return [
        *f"{MODEL_FLAGS} {TRAINING_FLAGS} {layout.flags}".split(),
        *("--expert-model-parallel-size", str(layout.expert_parallel_size)),
        *("--micro-batch-size", str(SAMPLES_PER_RANK), "--global-batch-size", str(SAMPLES_PER_RANK * layout.num_ranks)),
        *("--train-iters", str(num_iterations), "--lr-decay-iters", str(num_iterations)),
        # No evaluation or checkpoint in between; Megatron does both at the end anyway.
        *("--eval-interval", str(num_iterations + 1), "--save-interval", str(num_iterations)),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(folder.tokenizer)),
        *("--data-path", str(folder.dataset), "--data-cache-path", str(folder.cache)),
        *("--save", str(folder.checkpoints), *extra),
    ]


def launch_command(layout: Layout, flags: Sequence[str]) -> list[str]:
    """Returns the torchrun command for this machine; it needs neither a network nor a name service."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [*launcher, "--nproc-per-node", str(layout.num_ranks), str(REPOSITORY / "pretrain_gpt_moe.py"), *flags]


def train(command: Sequence[str], num_ranks: int, log: Path, on_line: Callable[[str], None]) -> None:
    """Runs one part of the training; its output goes to ``log`` and ``on_line``. Raises UsageError if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, num_cores() // num_ranks))}
    with log.open("a") as file, running(command, environment) as process:
        file.write(f"$ {shlex.join(command)}\n")
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            file.flush()
            on_line(line)
        status = process.wait()
    if status != 0:
        raise UsageError(f"the training ended with status {status}. The end of {tail(log)}")


def train_and_resume(
    folder: Folder, layout: Layout, flags: Sequence[str], num_iterations: int, tokens_per_iteration: int
) -> RunLog:
    """Trains to the middle, saves, resumes from the checkpoint, trains to the end and validates.

    Raises:
        UsageError: the training failed, or its log does not show one continued run.
    """
    run = RunLog()
    middle = num_iterations // 2
    progress = Progress(num_iterations, tokens_per_iteration)

    def on_line(line: str) -> None:
        iteration = run.feed(line)
        if iteration is not None:
            progress.step(iteration)
            if iteration.number == num_iterations:
                say("[6/8] final checkpoint and validation loss")

    first = ["--exit-interval", str(middle)]
    second = ["--load", str(folder.checkpoints), "--exit-on-missing-checkpoint", "--lancet-report", str(folder.root)]
    try:
        say(f"[4/8] training, steps 1 to {middle}, then a checkpoint: {layout.description}")
        train(launch_command(layout, [*flags, *first]), layout.num_ranks, folder.train_log, on_line)
        say(f"[5/8] resume from the checkpoint, steps {middle + 1} to {num_iterations}")
        train(launch_command(layout, [*flags, *second]), layout.num_ranks, folder.train_log, on_line)
    finally:
        progress.close()
    if not run.is_complete(num_iterations):
        raise UsageError(
            f"expected steps 1 to {num_iterations} once each and then a validation loss; the log has"
            f" {len(run.iterations)} steps and {run.validation}. The end of {tail(folder.train_log)}"
        )
    return run


def run_long(
    root: Path, num_iterations: int, vocab_size: int, corpus_megabytes: float | None, extra: Sequence[str]
) -> None:
    """Runs the long demo.

    Args:
        root: output folder.
        extra: further flags of pretrain_gpt_moe.py, which override the demo's.

    Raises:
        UsageError: the folder can't be used, or the training failed.
    """
    start_s = time.monotonic()
    folder = open_folder(root)
    prepared = prepare(folder, vocab_size, corpus_megabytes)
    entropy = prepared["unigram_entropy"]
    say(f"      {prepared['num_tokens'] / 1e6:.2f} million tokens, unigram entropy {entropy:.3f} nats per token")
    import torch  # slow to import, so after the checks above

    layout = choose_layout(torch.cuda.device_count())
    flags = training_flags(folder, layout, num_iterations, extra)
    tokens_per_iteration = int(last_value(flags, "--global-batch-size")) * int(last_value(flags, "--seq-length"))
    train_start_s = time.monotonic()
    run = train_and_resume(folder, layout, flags, num_iterations, tokens_per_iteration)
    train_seconds = time.monotonic() - train_start_s
    say("[7/8] sample from the trained model")
    sample = write_sample(folder)
    say(textwrap.indent(sample["prompt"] + sample["text"], "      | "))
    say("[8/8] loss curve and summary")
    summary = {**run.results(json.loads(folder.report.read_text())), "unigram_entropy": entropy, "sample": sample}
    title = f"GPT-MoE on the sources of Python's standard library, {layout.description}"
    curve = LossCurve(title, run, tokens_per_iteration, num_iterations // 2, entropy)
    write_png(curve, folder.picture)
    summary |= {"train_seconds": round(train_seconds, 1), "seconds": round(time.monotonic() - start_s, 1)}
    write_json(summary, folder.summary)
    say(results_text(summary))
    for what, path in {"loss curve": folder.picture, "summary": folder.summary, "log": folder.train_log}.items():
        say(f"  {what:<18} {shown(path)}")
