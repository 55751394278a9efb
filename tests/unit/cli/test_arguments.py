"""A tool's own words end where the launch begins."""

import argparse

import pytest

from megatron_lancet.cli.arguments import add_launch_arguments, own_words
from megatron_lancet.lab.modelled_step.arguments import add_arguments


@pytest.mark.parametrize(
    ("words", "launch_us", "launch"),
    [
        ("--launch-us 4 8.5 train.sh 7", [4, 8.5], "train.sh 7"),
        ("--launch-us 4 8 --connections 1 8 --layers 2 --num-layers 4", [4, 8], "--num-layers 4"),
        ("--launch-us=4 8", [4], "8"),
        ("--trust-script --link 10:1 --launch-us 4 train.sh", [4], "train.sh"),
        ("--launch-us 4 8", [4, 8], ""),
    ],
)
def test_a_flag_takes_all_its_values(words, launch_us, launch):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    add_launch_arguments(parser)
    own, rest = own_words(parser, words.split())
    assert rest == launch.split()
    assert parser.parse_args(own).launch_us == launch_us
