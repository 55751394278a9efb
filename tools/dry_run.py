"""Runs a launch dry: would it start, how large is each rank's memory, which plan would it have?

    lancet dry-run examples/qwen3_30b_a3b.sh
    lancet dry-run --world-size 64 --gpu-memory-gb 80 train.sh its arguments
    lancet dry-run --num-layers 32 --hidden-size 4096 ... (flags of Megatron)

It needs no GPU, data, tokenizer or checkpoint: docs/dry_run.md. A script runs with stand-ins for launchers, read-only
files and no network: docs/security.md. Exits with status 2 and one line if the run would refuse the launch, with 3 if a
rank needs more memory than a GPU has.
"""

import argparse
import sys
import warnings

from megatron_lancet.cli.arguments import add_launch_arguments, own_words, positive_float, positive_int
from megatron_lancet.errors import run_command
from megatron_lancet.training.megatron.versions import check_versions


def main() -> None:
    """Parses the tool's own flags, which stand before the launch, and runs the launch dry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=positive_int, metavar="N", help="ranks (default: as the launch says)")
    parser.add_argument(
        "--gpu-memory-gb",
        type=positive_float,
        metavar="GB",
        help="memory of a GPU, in 10^9 bytes (default: this machine's, else an H100's)",
    )
    add_launch_arguments(parser)
    own, rest = own_words(parser, sys.argv[1:])
    options = parser.parse_args(own)
    check_versions()
    warnings.simplefilter("ignore")
    from megatron_lancet.lab.dry_run.command import run_command_line  # imports Megatron, whose version has been checked

    run_command_line(options, rest)


if __name__ == "__main__":
    run_command(main)
