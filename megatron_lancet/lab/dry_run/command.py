"""``lancet dry-run``: from the command line to a report."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from megatron_lancet.lab.dry_run.run import run_dry
from megatron_lancet.lab.launch.launch import as_dry_run, read_launch


def run_command_line(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Runs a launch dry, in the environment that its script makes and for the ranks that it would start.

    Args:
        options: the flags of ``tools/dry_run.py``.
        words: the launch.

    Raises:
        UsageError: there is no such launch, or the run would refuse it.
    """
    launch = read_launch(words, options.trust_script)
    launched = None if launch.num_ranks is None else (launch.num_ranks, launch.ranks_from)
    given: list[str] = []
    for flag, value in (("--lancet-world-size", options.world_size), ("--lancet-gpu-memory-gb", options.gpu_memory_gb)):
        given += [] if value is None else [flag, str(value)]
    with as_dry_run(replace(launch, words=[*launch.words, *given])):  # the last one counts
        run_dry(launched)
