"""A small corpus, a tokenizer trained on it, and ways to call the tools in this process or in another."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.cli.loading import REPOSITORY, load_tool

SUBPROCESS_TIMEOUT_S = 120


@pytest.fixture(scope="session")
def prepare_corpus() -> ModuleType:
    return load_tool("data/prepare_corpus")


@pytest.fixture(scope="session")
def train_tokenizer() -> ModuleType:
    return load_tool("data/train_tokenizer")


@pytest.fixture(scope="session")
def preprocess_data() -> ModuleType:
    return load_tool("data/preprocess_data")


@pytest.fixture(scope="session")
def tool_command() -> Callable[..., list[str]]:
    """Command line of a tool for another process."""
    return lambda name, *arguments: [
        sys.executable,
        str(REPOSITORY / "tools" / f"{name}.py"),
        *map(str, arguments),
    ]


@pytest.fixture(scope="session")
def tool_environment() -> dict[str, str]:
    """Environment in which a tool finds the package even when it is not installed."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


@pytest.fixture(scope="session")
def run_tool(
    tool_command: Callable[..., list[str]], tool_environment: dict[str, str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a tool to its end in another process."""

    def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            tool_command(name, *arguments),
            env=tool_environment,
            capture_output=True,
            text=True,
            timeout=SUBPROCESS_TIMEOUT_S,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, prepare_corpus: ModuleType) -> Path:
    """About 0.4 MB of the standard library as JSONL."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    prepare_corpus.main(["--output", str(path), "--max-megabytes", "0.4"])
    return path


@pytest.fixture(scope="session")
def vocab_size() -> int:
    """Pieces of ``model``."""
    return 600


@pytest.fixture(scope="session")
def model(corpus: Path, vocab_size: int, train_tokenizer: ModuleType) -> Path:
    """A SentencePiece model learned from ``corpus``."""
    prefix = corpus.with_name("tokenizer")
    paths = ["--input", str(corpus), "--output-prefix", str(prefix)]
    train_tokenizer.main([*paths, "--vocab-size", str(vocab_size)])
    return Path(f"{prefix}.model")
