"""Runs the whole pipeline on one machine: corpus, tokenizer, expert-parallel training, resume, validation, sample.

It trains a small GPT-MoE on the sources of Python's standard library, on two CPU ranks or on the available GPUs, and
writes summary.json, report.json, loss_curve.png and train.log into the output folder. Prepared data is reused; training
always starts from scratch. Flags after -- go to pretrain_gpt_moe.py and override those of the demo.
"""

import argparse
import json
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import STDOUT
from typing import Any

from megatron_lancet.cli.arguments import positive_float, positive_int
from megatron_lancet.cli.training_process import Progress, running, say
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files import atomic_write
from megatron_lancet.report.loss_curve import LossCurve, write_png
from megatron_lancet.report.summary import REPORT_FILE
from megatron_lancet.report.train_log import RunLog, results_text, tail

REPOSITORY = Path(__file__).resolve().parents[1]

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

SAMPLE_PROMPT = "def read(self"
SAMPLE_TOKENS = 60
SAMPLE_FLAGS = ("--temperature", "0.8", "--top-p", "0.9", "--seed", "0")
"""A fixed seed, so that equal trainings end with equal samples."""


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


class Folder:
    """Paths of the demo's files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mark = root / ".megatron-lancet-demo"
        self.data = root / "data"
        self.corpus = self.data / "corpus.jsonl"
        self.tokenizer = self.data / "tokenizer.model"
        self.dataset = self.data / "stdlib_text_document"
        self.prepared = self.data / "prepared.json"
        self.checkpoints = root / "checkpoints"
        self.cache = root / "cache"
        self.prepare_log = root / "prepare.log"
        self.train_log = root / "train.log"
        self.report = root / REPORT_FILE
        self.picture = root / "loss_curve.png"
        self.summary = root / "summary.json"
        self.sample = root / "sample.json"


def shown(path: Path) -> str:
    """Returns a path relative to the current folder, if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_json(values: dict[str, Any], path: Path) -> None:
    """Writes ``path`` atomically."""
    atomic_write(path, json.dumps(values, indent=2) + "\n")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, default=REPOSITORY / "runs" / "demo", metavar="DIR", help="default: runs/demo")
    add("--train-iters", type=positive_int, default=500, metavar="N", help="training steps (default: %(default)s)")
    add(
        "--vocab-size",
        type=positive_int,
        default=2048,
        metavar="N",
        help="pieces of the tokenizer (default: %(default)s)",
    )
    add("--corpus-megabytes", type=positive_float, metavar="N", help="use only the first N million bytes")
    add("megatron_flags", nargs="*", metavar="FLAG", help="after --: further flags for pretrain_gpt_moe.py")
    arguments = parser.parse_args(argv)
    if arguments.train_iters < 2:
        parser.error("--train-iters must be at least 2: a step before the resume and one after it")
    return arguments


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


def open_folder(root: Path) -> Folder:
    """Creates the output folder and removes the results of an earlier demo from it.

    Raises:
        UsageError: the folder can't be created, or has other content than that of a demo.
    """
    folder = Folder(root)
    try:
        if root.exists() and not folder.mark.exists() and any(root.iterdir()):
            raise UsageError(f"{root} is not empty and not of this demo; pass another folder with --output")
        folder.data.mkdir(parents=True, exist_ok=True)
        folder.mark.touch()
    except OSError as error:
        raise UsageError(f"cannot use {root} as output folder: {error.strerror}; pass another with --output") from error
    for trained in (folder.checkpoints, folder.cache):
        shutil.rmtree(trained, ignore_errors=True)
    for result in (folder.train_log, folder.report, folder.picture, folder.summary, folder.sample):
        result.unlink(missing_ok=True)
    return folder


def load_prepared(folder: Folder, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the data that an earlier demo prepared with the same settings, None if it is incomplete."""
    files = (folder.tokenizer, Path(f"{folder.dataset}.bin"), Path(f"{folder.dataset}.idx"))
    try:
        prepared = json.loads(folder.prepared.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return prepared if prepared["settings"] == settings and all(file.is_file() for file in files) else None


def prepare(folder: Folder, vocab_size: int, corpus_megabytes: float | None) -> dict[str, Any]:
    """Prepares corpus, tokenizer and data set unless they exist. prepared.json, written last, marks them as complete.

    Returns:
        ``settings`` of the data set, its ``num_tokens``, and its ``unigram_entropy`` in nats per token.
    """
    python = platform.python_version()
    settings = {"vocab_size": vocab_size, "corpus_megabytes": corpus_megabytes, "python": python}
    prepared = load_prepared(folder, settings)
    if prepared is not None:
        say(f"[1-3/8] corpus, tokenizer and data set: reused from {shown(folder.data)}")
        return prepared
    folder.prepared.unlink(missing_ok=True)
    folder.prepare_log.write_text("")
    say(f"[1/8] corpus: the sources of Python {python}'s standard library")
    limit = ("--max-megabytes", corpus_megabytes) if corpus_megabytes else ()
    run_tool(folder.prepare_log, "prepare_corpus", "--output", folder.corpus, *limit)
    say(f"[2/8] tokenizer: SentencePiece, {vocab_size} pieces")
    model = ("--output-prefix", folder.tokenizer.with_suffix(""), "--vocab-size", vocab_size)
    run_tool(folder.prepare_log, "train_tokenizer", "--input", folder.corpus, *model)
    say("[3/8] data set: the tokenized corpus in Megatron's format")
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", folder.tokenizer)
    options = ("--append-eod", "--progress", "off", "--workers", min(2, num_cores()))
    prefix = ("--output-prefix", folder.data / "stdlib")
    run_tool(folder.prepare_log, "preprocess_data", "--input", folder.corpus, *prefix, *tokenizer, *options)
    num_tokens, entropy = measure_dataset(folder)
    prepared = {"settings": settings, "num_tokens": num_tokens, "unigram_entropy": entropy}
    write_json(prepared, folder.prepared)
    return prepared


def run_tool(log: Path, name: str, *arguments: object) -> None:
    """Runs another tool and appends its output to ``log``; raises UsageError if it fails."""
    command = [sys.executable, str(REPOSITORY / "tools" / f"{name}.py"), *map(str, arguments)]
    with log.open("a") as file:
        status = subprocess.run(command, stdout=file, stderr=STDOUT, check=False).returncode
    if status != 0:
        raise UsageError(f"tools/{name}.py ended with status {status}. The end of {tail(log)}")


def write_sample(folder: Folder) -> dict[str, str]:
    """Continues a prompt with the trained model on one rank; returns ``prompt`` and ``text``."""
    prompt = ("--prompt", SAMPLE_PROMPT, "--max-tokens", SAMPLE_TOKENS, *SAMPLE_FLAGS)
    run_tool(folder.train_log, "generate", "--load", folder.checkpoints, *prompt, "--output", folder.sample)
    written = json.loads(folder.sample.read_text())
    return {name: written[name] for name in ("prompt", "text")}


def measure_dataset(folder: Folder) -> tuple[int, float]:
    """Returns the number of tokens of the whole data set and its unigram entropy in nats per token."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
    with warnings.catch_warnings():
        # Megatron warns that Transformer Engine and Apex are missing; nothing here needs them.
        warnings.simplefilter("ignore", UserWarning)
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        from megatron_lancet.data.entropy import unigram_entropy_nats

        dataset = IndexedDataset(str(folder.dataset))  # the name keeps its arrays alive
        return int(dataset.sequence_lengths.sum()), unigram_entropy_nats(str(folder.dataset))


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
        UsageError: the training failed, or its log is not that of one continued run.
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


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    start_s = time.monotonic()
    arguments = parse_arguments(argv)
    folder = open_folder(arguments.output.resolve())
    prepared = prepare(folder, arguments.vocab_size, arguments.corpus_megabytes)
    entropy = prepared["unigram_entropy"]
    say(f"      {prepared['num_tokens'] / 1e6:.2f} million tokens, unigram entropy {entropy:.3f} nats per token")
    import torch  # slow to import, so after the checks above

    layout = choose_layout(torch.cuda.device_count())
    flags = training_flags(folder, layout, arguments.train_iters, arguments.megatron_flags)
    tokens_per_iteration = int(last_value(flags, "--global-batch-size")) * int(last_value(flags, "--seq-length"))
    train_start_s = time.monotonic()
    run = train_and_resume(folder, layout, flags, arguments.train_iters, tokens_per_iteration)
    train_seconds = time.monotonic() - train_start_s
    say("[7/8] sample from the trained model")
    sample = write_sample(folder)
    say(textwrap.indent(sample["prompt"] + sample["text"], "      | "))
    say("[8/8] loss curve and summary")
    summary = {**run.results(json.loads(folder.report.read_text())), "unigram_entropy": entropy, "sample": sample}
    title = f"GPT-MoE on the sources of Python's standard library, {layout.description}"
    curve = LossCurve(title, run, tokens_per_iteration, arguments.train_iters // 2, entropy)
    write_png(curve, folder.picture)
    summary |= {"train_seconds": round(train_seconds, 1), "seconds": round(time.monotonic() - start_s, 1)}
    write_json(summary, folder.summary)
    say(results_text(summary))
    for what, path in {"loss curve": folder.picture, "summary": folder.summary, "log": folder.train_log}.items():
        say(f"  {what:<18} {shown(path)}")


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            ending, lambda number, _: sys.exit(128 + number)
        )  # the default handler would end this process without its ranks
    try:
        run_command(main)
    except KeyboardInterrupt:
        print("interrupted: the training was stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
