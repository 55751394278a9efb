"""What TraceLens computes from our traces, next to our figures: python -m benchmarks.from_trace.tracelens_figures.

TraceLens (AMD-AGI/TraceLens) is no dependency of the project, and the package of this name on PyPI is another one. Get
it into an environment of its own as its README says, and name the interpreter:

    python -m benchmarks.from_trace.tracelens_figures runs/tiny_cpu/report/trace.json --tracelens-python PATH/bin/python

From its timeline of each rank it takes the time of communication and the part in which nothing computes; ours are the
time with messages in flight and the part in which the rank waits. Its analysis of collectives refuses messages that do
not fit together on all ranks; of it come the number of messages with rows, and their bytes. Fails if a share differs by
more than 2 percent points, or a number or bytes at all.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.origin import finished, origin
from benchmarks.harness.tables import aligned
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.views.kernel_fields import OF_ROWS, collective_name
from megatron_lancet.lab.views.rank_traces import hidden_share, write_rank_traces
from megatron_lancet.lab.views.trace_file import read_trace
from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.schedule.timeline import Lane

MAX_DIFFERENCE = 2.0
"""Percent points."""
_TIMEOUT_S = 120
_BYTES_PER_MB = 1024**2
_ANALYSIS = """
import contextlib, json, logging, sys
logging.disable(logging.CRITICAL)
from TraceLens import NcclAnalyser, TreePerfAnalyzer
with contextlib.redirect_stdout(sys.stderr):
    messages = NcclAnalyser(sys.argv[1:], len(sys.argv) - 1).build_df_nccl_all2allv(strict_metadata_check=True)
    found = {"num_messages": len(messages), "megabytes": float(messages["total data communicated (MB)"].sum())}
    found["ranks"] = []
    for path in sys.argv[1:]:
        table = TreePerfAnalyzer.from_file(path).get_df_gpu_timeline()
        found["ranks"].append({row["type"]: float(row["time ms"]) for _, row in table.iterrows()})
print(json.dumps(found))
"""


def their_figures(python: Path, paths: Sequence[Path]) -> dict[str, Any]:
    """What TraceLens says of the traces of ranks, in their order.

    Args:
        python: interpreter of an environment that has TraceLens.

    Raises:
        UsageError: TraceLens is not there, or refuses the traces.
    """
    command = [str(python), "-c", _ANALYSIS, *map(str, paths)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except OSError as error:
        raise UsageError(f"--tracelens-python {python}: {error.strerror}; name an interpreter that has it") from error
    if done.returncode:
        raise UsageError(f"TraceLens does not read the traces: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def our_figures(record: TimelineRecord) -> dict[str, Any]:
    """The same figures from the record: exposed share in percent by rank, and all groups' messages with rows."""
    rows = [
        span
        for timeline in record.measured
        for span in timeline.spans
        if span.lane is Lane.COMM and collective_name(span.name) == OF_ROWS
    ]
    return {
        "num_messages": len(rows) // max(1, len(record.ep_groups[0])) if record.ep_groups else len(rows),
        "megabytes": sum(span.num_bytes for span in rows) / _BYTES_PER_MB,
        "exposed": {timeline.rank: 100 * (1 - hidden_share(timeline)) for timeline in record.measured},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE.json", help="trace.json of a run's report")
    parser.add_argument("--tracelens-python", type=Path, default=Path("python"), help="interpreter that has TraceLens")
    parser.add_argument("--output", type=Path, help="JSON with the figures, and where they come from")
    args = parser.parse_args(argv)
    started = None if args.output is None else origin("benchmarks.from_trace.tracelens_figures")
    try:
        record = read_trace(args.trace)
    except RecordError as error:
        raise UsageError(f"this is not the trace of a run: {error}") from error
    ours = our_figures(record)
    with tempfile.TemporaryDirectory(prefix="lancet-tracelens-") as folder:
        found = their_figures(args.tracelens_python, write_rank_traces(record, Path(folder)))
    theirs = {
        timeline.rank: 100 * of_rank["exposed_comm_time"] / max(of_rank["total_comm_time"], 1e-9)
        for timeline, of_rank in zip(record.measured, found["ranks"], strict=True)
    }
    lines = [["", "TraceLens", "ours"]]
    lines += [
        [f"rank {rank}, % exposed", f"{share:.2f}", f"{ours['exposed'][rank]:.2f}"] for rank, share in theirs.items()
    ]
    lines += [["messages with rows", str(found["num_messages"]), str(ours["num_messages"])]]
    lines += [["their MB, all ranks", f"{found['megabytes']:.4f}", f"{ours['megabytes']:.4f}"]]
    print(aligned(lines))
    if started is not None:
        figures = {**finished(started), "trace": record.title, "theirs": found}
        args.output.write_text(json.dumps({**figures, "ours": ours}) + "\n")
    if any(abs(share - ours["exposed"][rank]) > MAX_DIFFERENCE for rank, share in theirs.items()):
        raise SystemExit(f"shares differ by more than {MAX_DIFFERENCE:g} percent points")
    if found["num_messages"] != ours["num_messages"] or abs(found["megabytes"] - ours["megabytes"]) > 1e-6:
        raise SystemExit("messages or their bytes differ")


if __name__ == "__main__":
    run_command(main)
