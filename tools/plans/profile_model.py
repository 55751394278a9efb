"""Measures what a model's ops, links and layers cost, and writes a profile for the planner.

    torchrun --nproc-per-node 2 -m megatron_lancet plan profile --output profile.json LAUNCH
    WORLD_SIZE=8 lancet plan profile --output profile.json train.sh --distributed-backend mock

LAUNCH is a launch script with its arguments, a file of Megatron's flags, or the flags. The command runs real training
steps under a few plans, on the run's own data (--mock-data is enough) and between its own ranks; in a mocked world
--lancet-mock-link sets the link times. No checkpoint is loaded, and only the profile is saved.
"""

import argparse
import sys
from pathlib import Path

from megatron_lancet.cli.arguments import add_launch_arguments, own_words
from megatron_lancet.errors import run_command
from megatron_lancet.lab.launch.flag_file import split_flags
from megatron_lancet.lab.launch.launch import read_launch
from megatron_lancet.training.pretrain import main as pretrain

_ENOUGH_STEPS = 1000
"""The run ends when the profile is complete."""
_DEFAULTS = f"--train-iters {_ENOUGH_STEPS} --lr 1e-5 --eval-interval {_ENOUGH_STEPS}".split()
_ALWAYS = ["--eval-iters", "0", "--log-interval", str(_ENOUGH_STEPS)]
_DROPPED = (
    *("--train-samples", "--lr-decay-samples", "--lr-warmup-samples"),  # not with --train-iters
    *("--save", "--save-interval", "--load", "--pretrained-checkpoint"),
)


def main() -> None:
    """Runs the training script with the tool's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="PROFILE", help="file for the profile (JSON)")
    add_launch_arguments(parser)
    words, rest = own_words(parser, sys.argv[1:])
    own = parser.parse_args(words)
    launch = read_launch(rest, own.trust_script)
    launch.set_environment()
    kept = (word for flag in split_flags(launch.words) if flag[0] not in _DROPPED for word in flag)
    # The last one counts of a flag that is given twice.
    sys.argv[1:] = [*_DEFAULTS, *kept, *_ALWAYS, "--lancet-profile", str(own.output)]
    pretrain()


if __name__ == "__main__":
    run_command(main)
