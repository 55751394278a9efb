"""What to run first on a machine with a GPU: tests and the benchmark, within ten minutes, all results in one folder.

    make check-gpu OUT=folder        # or: python tools/check_gpu.py folder

The folder gets the output of each part (NAME.log), the tests' results (tests.xml), the benchmark's samples
(benchmark.json), and summary.json, which says how each part ended. A part that fails or takes too long does not keep
the others from running. With two GPUs or more the tests include ranks that talk over NCCL.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.runtime.connections import CONNECTIONS, has_one_connection

_REPO = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        limit_s: time after which it is stopped.
    """

    name: str
    command: Sequence[str]
    limit_s: float


@dataclass(frozen=True)
class Result:
    """How a part ended.

    Attributes:
        status: exit status; None if it was stopped at its limit, or could not be started.
    """

    name: str
    status: int | None
    seconds: float


def parts(folder: Path) -> list[Part]:
    """What is run, in this order; the limits add up to less than ten minutes."""
    python = sys.executable
    benchmark = ["benchmarks.gpu", "--size", "gpt2-s-moe", "--rounds", "5", "--warmup", "2", "--link", "10:50"]
    return [
        Part("device", ["nvidia-smi"], 20),
        Part("torch", [python, "-m", "torch.utils.collect_env"], 60),
        Part("tests", [python, "-m", "pytest", "tests/gpu", "--junitxml", str(folder / "tests.xml")], 250),
        Part("benchmark", [python, "-m", *benchmark, "--output", str(folder / "benchmark.json")], 250),
    ]


def run(part: Part, folder: Path) -> Result:
    """Runs a part, with its output in a file."""
    start_s = time.monotonic()
    status: int | None = None
    with (folder / f"{part.name}.log").open("w") as log:
        try:
            done = subprocess.run(
                part.command,
                cwd=_REPO,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                timeout=part.limit_s,
                check=False,
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            log.write(f"\nstopped after {part.limit_s:g} s\n")
        except OSError as error:
            log.write(f"can't be started: {error}\n")
    return Result(part.name, status, round(time.monotonic() - start_s, 1))


def run_all(folder: Path, all_parts: Sequence[Part]) -> bool:
    """Runs the parts and writes the summary; returns whether all ended well."""
    results = []
    for part in all_parts:
        print(f"{part.name}: {' '.join(part.command)}", flush=True)
        results.append(run(part, folder))
        ended = "was stopped, or could not be started" if results[-1].status is None else f"exit {results[-1].status}"
        print(f"  {ended} after {results[-1].seconds:g} s, output in {folder / part.name}.log", flush=True)
        summary = json.dumps([asdict(result) for result in results], indent=1)
        (folder / "summary.json").write_text(summary + "\n")
    return all(result.status == 0 for result in results)


def main(argv: Sequence[str] | None = None) -> None:
    """Checks that there is a GPU, then runs all parts; the exit status is 1 if one of them failed.

    Raises:
        UsageError: there is no GPU, or CUDA has one connection.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the results")
    folder = parser.parse_args(argv).folder.resolve()
    if torch.cuda.device_count() == 0:
        raise UsageError(
            f"this runs on a CUDA device, and torch {torch.__version__} finds none. Without one, make test runs the "
            "same tests on the virtual GPU."
        )
    if has_one_connection():
        raise UsageError(f"{CONNECTIONS} is 1, with which the benchmark can't run. Unset it.")
    folder.mkdir(parents=True, exist_ok=True)
    if not run_all(folder, parts(folder)):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
