"""Make timeline.html and trace.json of timelines that a run or the simulator saved.

timeline.html opens in any browser and needs no network; trace.json is for ui.perfetto.dev or chrome://tracing.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files import RecordError
from megatron_lancet.report.timeline.timeline_file import read_timelines
from megatron_lancet.report.timeline.views import write_views


def main(argv: Sequence[str] | None = None) -> None:
    """Read the timelines, write both files, say where they are.

    Raises:
        UsageError: the timelines can't be read or the files can't be written.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("timelines", type=Path, metavar="TIMELINE.json", help="what a run saved")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for both files (default: of TIMELINE.json)")
    args = parser.parse_args(argv)
    try:
        record = read_timelines(args.timelines)
    except RecordError as error:
        raise UsageError(f"these are no timelines: {error}") from error
    folder = args.output or args.timelines.parent
    try:
        written = write_views(record, folder)
    except OSError as error:
        raise UsageError(f"can't write into {folder}: {error.strerror}; name another folder with --output") from error
    for path in written:
        print(f"written to {path}")


if __name__ == "__main__":
    run_command(main)
