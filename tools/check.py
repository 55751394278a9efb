"""Checks a launch on a few CPU ranks: is each gradient what one rank computes, and does the overlap change any?

    lancet-check examples/qwen3_30b_a3b.sh
    lancet-check --json found.json --num-layers 16 --hidden-size 1024 ... (flags of Megatron)

A script runs with stand-ins for launchers, read-only files and no network: docs/security.md.
The launch is shrunk: few layers, small sizes, two ranks on each parallel axis; axes, routers, recompute, losses stay.
Exits with status 0 if everything is equal, 1 if something differs, 2 if the launch was not checked, and 3 if stock is
equal but the overlap was not compared. Coverage: docs/check.md.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path

from megatron_lancet.cli.arguments import positive_float, positive_int, require_output_folder
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.training.megatron.versions import check_versions


def main() -> None:
    """Parses the tool's own flags, which stand before the launch, and checks the launch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to this file")
    parser.add_argument(
        "--max-ranks", type=positive_int, default=8, metavar="N", help="most CPU ranks (default %(default)s)"
    )
    parser.add_argument("--padding", action="store_true", help="samples end with padding, which routers mask")
    parser.add_argument(
        "--te", action="store_true", help="keep layers of Transformer Engine, where it computes without a GPU"
    )
    parser.add_argument("--stock-only", action="store_true", help="do not compare the overlap")
    parser.add_argument(
        "--trust-script", action="store_true", help="run the launch script without isolation, with access to all files"
    )
    parser.add_argument("--dry-run", action="store_true", help="run the launch dry instead: docs/dry_run.md")
    parser.add_argument(
        "--timeout-s", type=positive_float, default=300.0, metavar="S", help="of each run (default %(default)s)"
    )
    parser.add_argument(
        "launch", nargs=argparse.REMAINDER, help="a launch script with its arguments, or Megatron's flags"
    )
    own, rest = _own_words(parser, sys.argv[1:])
    options = parser.parse_args(own)
    if options.json is not None:
        require_output_folder(options.json)
    if options.max_ranks < 2:
        raise UsageError(f"--max-ranks expects at least 2, got {options.max_ranks}.")
    check_versions()
    if not options.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are forks on CPUs, also where there is a GPU
    warnings.filterwarnings("ignore", category=UserWarning)  # of Megatron's imports: packages for GPUs are not needed
    from megatron_lancet.lab.check.run import run_check  # imports Megatron, whose version has been checked

    sys.exit(run_check(options, rest))


def _own_words(parser: argparse.ArgumentParser, words: list[str]) -> tuple[list[str], list[str]]:
    """Splits the command line where the launch begins: at the first word that is none of the tool's flags or values."""
    takes_value = {o: a.nargs != 0 for a in parser._actions for o in a.option_strings}
    position = 0
    while position < len(words) and words[position].partition("=")[0] in takes_value:
        name, equals, _ = words[position].partition("=")
        position += 2 if takes_value[name] and not equals else 1
    return words[:position], words[position:]


if __name__ == "__main__":
    run_command(main)
