"""Models a micro-batch of a launch command on GPUs that are not there: kernels per layer, step time, a timeline.

    WORLD_SIZE=8 lancet plan step --link 10:350 LAUNCH
    lancet plan step --launch-us 4 --connections 8 --timeline step.html LAUNCH

LAUNCH is a launch script with its arguments, a file of Megatron's flags, or the flags. The command runs the model
without values (torch's meta device) and plays what it enqueues on a model of a GPU. docs/virtual_gpu.md says what that
can and can't show.
"""

import argparse
import logging
import sys
import warnings

from megatron_lancet.cli.arguments import add_launch_arguments, own_words
from megatron_lancet.errors import run_command
from megatron_lancet.lab.launch.launch import read_launch
from megatron_lancet.lab.modelled_step.arguments import add_arguments, check_arguments
from megatron_lancet.training.megatron.versions import check_versions


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_arguments(parser)
    add_launch_arguments(parser)
    words, rest = own_words(parser, sys.argv[1:])
    own = parser.parse_args(words)
    check_arguments(own)
    check_versions()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    # Imported only now, because this imports megatron, whose version has been checked.
    from megatron_lancet.lab.modelled_step import command

    print(command.modelled(own, read_launch(rest, own.trust_script)))


if __name__ == "__main__":
    run_command(main)
