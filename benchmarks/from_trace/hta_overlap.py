"""What HTA computes from our traces, next to our own figure: python -m benchmarks.from_trace.hta_overlap TRACE.json.

HTA (Holistic Trace Analysis) is no dependency of the project. Install it into an environment of its own:

    python -m venv /tmp/hta && /tmp/hta/bin/pip install HolisticTraceAnalysis
    python -m benchmarks.from_trace.hta_overlap runs/tiny_cpu/report/trace.json --hta-python /tmp/hta/bin/python

Ours is the share of the time with messages in flight in which a rank does not wait for one; HTA's that in which it runs
a compute kernel. Fails if they differ by more than 2 percent points on any rank.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.origin import finished, origin
from benchmarks.harness.tables import aligned
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.views.rank_traces import hidden_share, write_rank_traces
from megatron_lancet.lab.views.trace_file import read_trace

MAX_DIFFERENCE = 2.0
"""Percent points."""
_TIMEOUT_S = 120
_ANALYSIS = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
found = TraceAnalysis(trace_dir=sys.argv[1]).get_comm_comp_overlap(visualize=False)
print(json.dumps({str(int(row["rank"])): float(row["comp_comm_overlap_pctg"]) for _, row in found.iterrows()}))
"""


def hta_percentages(python: Path, folder: Path) -> dict[int, float]:
    """HTA's overlap of each rank whose trace is in a folder.

    Args:
        python: interpreter of an environment that has HTA.

    Raises:
        UsageError: HTA is not there, or refuses the traces.
    """
    command = [str(python), "-c", _ANALYSIS, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except OSError as error:
        raise UsageError(f"--hta-python {python}: {error.strerror}; name an interpreter that has HTA") from error
    if done.returncode:
        raise UsageError(f"HTA does not read the traces: {done.stderr.strip().splitlines()[-1]}")
    return {int(rank): value for rank, value in json.loads(done.stdout.strip().splitlines()[-1]).items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE.json", help="trace.json of a run's report")
    parser.add_argument("--hta-python", type=Path, default=Path("python"), help="interpreter that has HTA (python)")
    parser.add_argument("--output", type=Path, help="JSON with the figures, and where they come from")
    args = parser.parse_args(argv)
    started = None if args.output is None else origin("benchmarks.from_trace.hta_overlap")
    try:
        record = read_trace(args.trace)
    except RecordError as error:
        raise UsageError(f"this is not the trace of a run: {error}") from error
    with tempfile.TemporaryDirectory(prefix="lancet-hta-") as folder:
        write_rank_traces(record, Path(folder))
        theirs = hta_percentages(args.hta_python, Path(folder))
    ours = {timeline.rank: 100 * hidden_share(timeline) for timeline in record.measured}
    lines = [["rank", "HTA, % overlapped", "ours", "difference"]]
    lines += [
        [str(rank), f"{theirs[rank]:.2f}", f"{ours[rank]:.2f}", f"{theirs[rank] - ours[rank]:+.2f}"] for rank in ours
    ]
    print(aligned(lines))
    if started is not None:
        result = {**finished(started), "trace": record.title, "hta": theirs, "ours": ours}
        args.output.write_text(json.dumps(result) + "\n")
    if max(abs(theirs[rank] - ours[rank]) for rank in ours) > MAX_DIFFERENCE:
        raise SystemExit(f"they differ by more than {MAX_DIFFERENCE:g} percent points")


if __name__ == "__main__":
    run_command(main)
