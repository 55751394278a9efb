"""Estimates what overlap would bring to a launch script, before anything runs: step, exposed share, memory.

    lancet estimate examples/qwen3_30b_a3b.sh --cluster 4x8:h100,nvlink,400g
    lancet estimate --cluster 32x8:h100,nvlink,400g --routing zipf:0.5 --num-layers 48 ... (flags of Megatron)
    lancet estimate --published

A script runs with stand-ins for launchers, read-only files and no network: docs/security.md.
It needs no profile, no GPU and no cluster. All figures are ranges, over what kernels and links reach of their data
sheets; nothing is measured. docs/estimate.md says how it is computed, and how far it was from published runs.
"""

import argparse
import sys
import warnings

from megatron_lancet.cli.arguments import require_output_folder
from megatron_lancet.errors import run_command
from megatron_lancet.lab.estimate.arguments import add_arguments
from megatron_lancet.training.megatron.versions import check_versions


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="%(prog)s LAUNCH --cluster NODESxGPUS:GPU,INTRA,INTER [--routing {even,zipf:S}] [--json FILE]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser)
    options, words = parser.parse_known_args()
    if options.json is not None:
        require_output_folder(options.json)
    check_versions()
    warnings.simplefilter("ignore")
    # Imported only now, because this imports megatron, whose version has been checked.
    from megatron_lancet.lab.estimate import command

    sys.stdout.write(command.run_command_line(options, words) + "\n")


if __name__ == "__main__":
    run_command(main)
