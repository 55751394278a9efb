"""Corpus, tokenizer and data set, made by the project's own tools; and a sample of the trained model."""

import json
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path
from subprocess import STDOUT
from typing import Any

from benchmarks.demo.folder import REPOSITORY, Folder, shown, write_json
from benchmarks.demo.training_log.train_log import tail
from benchmarks.demo.training_log.training_process import say
from megatron_lancet.errors import UsageError

SAMPLE_PROMPT = "def read(self"
SAMPLE_TOKENS = 60
SAMPLE_FLAGS = ("--temperature", "0.8", "--top-p", "0.9", "--seed", "0")
"""A fixed seed, so that equal trainings end with equal samples."""


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    run_tool(folder.prepare_log, "data/prepare_corpus", "--output", folder.corpus, *limit)
    say(f"[2/8] tokenizer: SentencePiece, {vocab_size} pieces")
    model = ("--output-prefix", folder.tokenizer.with_suffix(""), "--vocab-size", vocab_size)
    run_tool(folder.prepare_log, "data/train_tokenizer", "--input", folder.corpus, *model)
    say("[3/8] data set: the tokenized corpus in Megatron's format")
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", folder.tokenizer)
    options = ("--append-eod", "--progress", "off", "--workers", min(2, num_cores()))
    prefix = ("--output-prefix", folder.data / "stdlib")
    run_tool(folder.prepare_log, "data/preprocess_data", "--input", folder.corpus, *prefix, *tokenizer, *options)
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
    with warnings.catch_warnings():
        # Megatron warns that Transformer Engine and Apex are missing; nothing here needs them.
        warnings.simplefilter("ignore", UserWarning)
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        from benchmarks.demo.training_log.entropy import unigram_entropy_nats

        dataset = IndexedDataset(str(folder.dataset))  # the name keeps its arrays alive
        return int(dataset.sequence_lengths.sum()), unigram_entropy_nats(str(folder.dataset))
