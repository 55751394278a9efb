"""Models a micro-batch of a launch command on GPUs that are not there: kernels per layer, step time, a timeline.

    WORLD_SIZE=8 python tools/virtual_gpu.py --link 10:350 [flags of pretrain_gpt_moe.py]
    python tools/virtual_gpu.py --launch-us 4 --connections 8 --timeline step.html [flags of pretrain_gpt_moe.py]

Takes the flags of pretrain_gpt_moe.py, runs the model without values (torch's meta device) and plays what it enqueues
on a model of a GPU. docs/virtual_gpu.md says what that can and can't show.
"""

import argparse
import logging
import warnings

from megatron_lancet.errors import run_command
from megatron_lancet.lab.modelled_step.arguments import add_arguments, check_arguments
from megatron_lancet.training.megatron.versions import check_versions


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_arguments(parser)
    own, flags = parser.parse_known_args()
    check_arguments(own)
    check_versions()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    # Imported only now, because this imports megatron, whose version has been checked.
    from megatron_lancet.lab.modelled_step import command

    print(command.modelled(own, flags))


if __name__ == "__main__":
    run_command(main)
