"""One part of the check on a GPU: ``python -m benchmarks.gpu.check PART FILE --limit SECONDS [--rehearse]``.

The part saves its results in FILE as it goes, a JSON object in each line. ``tools/check_gpu.py`` runs all parts.
"""

import argparse
import importlib
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.check.parts import PARTS
from benchmarks.gpu.record import Recorder
from megatron_lancet.errors import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the part; the exit status is 1 if one of its results is an error."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[part.name for part in PARTS])
    parser.add_argument("file", type=Path, help="for the results")
    parser.add_argument("--limit", type=float, required=True, metavar="SECONDS", help="time that the part may take")
    parser.add_argument("--rehearse", action="store_true", help="on the virtual GPU, with small models")
    args = parser.parse_args(argv)
    record = Recorder(args.file, args.limit)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from benchmarks.gpu.check.place import on_device, rehearsal

    part = importlib.import_module(f"benchmarks.gpu.check.part.{args.part}")
    with record.guarded(args.part), (rehearsal if args.rehearse else on_device)() as place:
        part.run(record, place)
    if record.num_errors:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
