"""Checks a launch on a few CPU ranks: is each gradient what one rank computes, and does the overlap change any?

    lancet check examples/qwen3_30b_a3b.sh
    lancet check --json found.json --num-layers 16 --hidden-size 1024 ... (flags of Megatron)

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

from megatron_lancet.cli.arguments import (
    add_launch_arguments,
    own_words,
    positive_float,
    positive_int,
    require_output_folder,
)
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
        "--timeout-s", type=positive_float, default=300.0, metavar="S", help="of each run (default %(default)s)"
    )
    add_launch_arguments(parser)
    own, rest = own_words(parser, sys.argv[1:])
    options = parser.parse_args(own)
    if options.json is not None:
        require_output_folder(options.json)
    if options.max_ranks < 2:
        raise UsageError(f"--max-ranks expects at least 2, got {options.max_ranks}.")
    check_versions()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are forks on CPUs, also where there is a GPU
    warnings.filterwarnings("ignore", category=UserWarning)  # of Megatron's imports: packages for GPUs are not needed
    from megatron_lancet.lab.check.run import run_check  # imports Megatron, whose version has been checked

    sys.exit(run_check(options, rest))


if __name__ == "__main__":
    run_command(main)
