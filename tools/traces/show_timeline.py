"""Makes timeline.html from a trace.json that a run saved.

timeline.html opens in any browser and needs no network; trace.json itself is for ui.perfetto.dev or chrome://tracing.
With --rank-traces also one trace per rank as torch.profiler writes them, for HTA and TraceLens.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.views.html import TIMELINE_PAGE, write_page
from megatron_lancet.lab.views.rank_traces import write_rank_traces
from megatron_lancet.lab.views.trace_file import read_trace


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the trace, writes the page and prints its path.

    Raises:
        UsageError: the trace can't be read or the page can't be written.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE.json", help="trace that a run saved")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for the page (default: next to TRACE.json)")
    parser.add_argument(
        "--rank-traces", type=Path, metavar="DIR", help="folder for one trace per measured rank (rank-N.json)"
    )
    args = parser.parse_args(argv)
    try:
        record = read_trace(args.trace)
    except RecordError as error:
        raise UsageError(f"this is not the trace of a run: {error}") from error
    folder = args.output or args.trace.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_page(record, folder / TIMELINE_PAGE)
    except OSError as error:
        raise UsageError(f"can't write into {folder}: {error.strerror}; name another folder with --output") from error
    print(f"written to {folder / TIMELINE_PAGE}")
    if args.rank_traces is None:
        return
    try:
        args.rank_traces.mkdir(parents=True, exist_ok=True)
        written = write_rank_traces(record, args.rank_traces)
    except OSError as error:
        raise UsageError(
            f"can't write into {args.rank_traces}: {error.strerror}; name another folder with --rank-traces"
        ) from error
    print(f"written to {', '.join(map(str, written))}")


if __name__ == "__main__":
    run_command(main)
