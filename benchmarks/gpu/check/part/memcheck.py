"""One step of ours under ``compute-sanitizer --tool memcheck``: whether a kernel reads or writes outside of a tensor.

The step runs in a process of its own under the tool, ``python -m benchmarks.gpu.check.part.memcheck FILE``, which saves
each step that has ended in FILE. Tensors have an allocation each there: torch's cache would hide what lies next to
them.
"""

import argparse
import ctypes
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.check.place import Place, on_device, rehearsal
from benchmarks.gpu.record import Recorder, read_records

TOOL = "compute-sanitizer"
_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
PLANS = ("ours k=2", "pairs")
_NUM_RANKS, _NUM_MICRO_BATCHES = 8, 2
_LIMIT_S = 80.0
_RESERVE_S = 4.0
"""Of the part's limit, for its end."""
_NUM_SHOWN = 3
"""Errors that are saved in full."""
_MOST_LINES = 12
_TAIL_CHARS = 3000
_PREFIX = "========="
_PR_SET_PDEATHSIG = 1


class MemcheckError(RuntimeError):
    """A kernel has accessed memory that it must not, or the step has failed under the tool."""


@dataclass(frozen=True)
class Summary:
    """Output of the tool.

    Attributes:
        num_errors: by the tool's summary; None if it was ended before it wrote one.
        errors: the text of each error.
    """

    num_errors: int | None
    errors: list[str]


def run(record: Recorder, place: Place) -> None:
    """The part."""
    tool = find_tool()
    if tool is None:
        record.add("memcheck", runs=False, why=f"{TOOL} is neither on PATH nor in {', '.join(_FOLDERS)}")
        return
    with tempfile.TemporaryDirectory(prefix="memcheck") as folder:
        steps, log = Path(folder) / "steps.jsonl", Path(folder) / "memcheck.log"
        limit_s = min(_LIMIT_S, record.time_left_s() - _RESERVE_S)
        status, output = _run_tool(tool, log, steps, place, limit_s)
        summary = read_summary(log.read_text(errors="replace") if log.exists() else "")
        ended = read_records(steps)
        for step in ended:
            record.add(**step)
    with record.guarded("memcheck"):
        check(summary, status, len(ended), output)
        check_kernels(ended)
        text = "" if status is not None else f"; it was ended after {limit_s:.0f} s, and what it had begun is not known"
        record.add("memcheck", runs=True, errors=0, steps=len(ended), ended=status is not None, why=f"no error{text}")


def find_tool() -> str | None:
    """Path of the tool; None where it is not installed."""
    return shutil.which(TOOL) or shutil.which(TOOL, path=os.pathsep.join(_FOLDERS))


def _run_tool(tool: str, log: Path, steps: Path, place: Place, limit_s: float) -> tuple[int | None, str]:
    """Runs the steps under the tool; its exit status, None if it was ended, and what the steps have printed."""
    command = [tool, "--tool", "memcheck", "--target-processes", "application-only", "--require-cuda-init", "no"]
    # torch asks CUDA for what an older driver or device may lack, and goes on: such answers are no errors of memory.
    command += ["--report-api-errors", "no", "--print-limit", "20", "--log-file", str(log)]
    command += [sys.executable, "-m", "benchmarks.gpu.check.part.memcheck", str(steps), "--limit", str(limit_s)]
    if place.is_rehearsal:
        command.append("--rehearse")
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    try:
        output, _ = process.communicate(timeout=max(limit_s, 0.0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def read_summary(log: str) -> Summary:
    """Reads what the tool prints: its lines have a prefix, an empty one ends an error, a summary is the last."""
    found = re.search(rf"^{_PREFIX} ERROR SUMMARY: (\d+) error", log, re.MULTILINE)
    errors: list[list[str]] = []
    is_inside = False
    for line in log.splitlines():
        text = line.removeprefix(_PREFIX).removeprefix(" ") if line.startswith(_PREFIX) else ""
        if re.match(
            r"(Invalid|Misaligned|Program hit|Out-of-range|Unallocated|Double|Unspecified|Error: process)", text
        ):
            errors.append([])
            is_inside = True
        is_inside = is_inside and bool(text.strip())
        if is_inside and len(errors[-1]) < _MOST_LINES:
            errors[-1].append(text.strip())
    return Summary(None if found is None else int(found[1]), ["\n".join(lines) for lines in errors])


def check(summary: Summary, status: int | None, num_steps: int, output: str) -> None:
    """
    Args:
        status: of the tool; None if it was ended at its limit.
        num_steps: steps that have ended.
        output: what they printed.

    Raises:
        MemcheckError: the tool has found an error, has not come to an end, or steps are missing.
    """
    if summary.num_errors or summary.errors:
        number = len(summary.errors) if summary.num_errors is None else summary.num_errors
        shown = "\n".join(summary.errors[:_NUM_SHOWN])
        raise MemcheckError(f"{number} errors, the first of which are\n{shown}")
    if status is None:
        return
    if summary.num_errors is None:
        raise MemcheckError(f"{TOOL} ended with status {status} and no summary: {output[-_TAIL_CHARS:]}")
    if num_steps < len(PLANS):
        raise MemcheckError(f"{num_steps} of {len(PLANS)} steps ended; status {status}: {output[-_TAIL_CHARS:]}")


def check_kernels(steps: Sequence[Mapping[str, Any]]) -> None:
    """
    Raises:
        MemcheckError: a step has ended without a kernel that the device has.
    """
    missing = [f"{kernel} in {step['plan']}" for step in steps for kernel in step["missing"]]
    if missing:
        raise MemcheckError(f"expected kernels that did not run: {', '.join(missing)}")


def run_steps(record: Recorder, place: Place) -> None:
    """A step in bf16 of each plan, as rank 0 of a mocked group; the process that the tool watches."""
    import torch

    from benchmarks.gpu.check.part.models import counted_row_sums
    from benchmarks.gpu.sizes import SIZES
    from benchmarks.gpu.variants import Runner, Variant, Work
    from benchmarks.gpu.world import mocked_group
    from megatron_lancet.model.local_experts import grouped_linear
    from megatron_lancet.patching import around
    from megatron_lancet.runtime.device import has_grouped_gemm
    from megatron_lancet.testkit.mock.link import Link

    num_products = 0

    def grouped_mm(stock: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_products
        num_products += 1
        return stock(*args, **kwargs)

    work = Work(SIZES["tiny"], _NUM_RANKS, _NUM_MICRO_BATCHES, place.device)
    link = Link(latency_us=10, gbytes_per_s=50)
    groups = has_grouped_gemm(torch.empty(0, dtype=torch.bfloat16, device=place.device))
    with mocked_group(_NUM_RANKS) as using_link, around(grouped_linear, "grouped_mm", grouped_mm), using_link(link):
        for plan in PLANS:
            runner, num_products = Runner(Variant.named(plan), work), 0
            with place.watch(), counted_row_sums() as row_sums:
                runner.step()
            missing = ["grouped products"] if groups and not num_products else []
            missing += ["sums of rows"] if row_sums.is_missing else []
            counts = {"grouped_products": num_products, "row_sums": row_sums.number}
            record.add("step under memcheck", plan=plan, **counts, missing=missing)


def main(words: Sequence[str] | None = None) -> None:
    """Entry point of the process that the tool watches."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.check.part.memcheck", description=__doc__)
    parser.add_argument("file", type=Path, help="for the steps that have ended")
    parser.add_argument("--limit", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args(words)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    record = Recorder(args.file, args.limit)
    with (rehearsal if args.rehearse else on_device)() as place:
        run_steps(record, place)


if __name__ == "__main__":
    main()
