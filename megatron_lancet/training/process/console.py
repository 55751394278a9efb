"""Prints lines of a run on standard output, next to Megatron's own log, once for all ranks."""

import os


def say(line: str) -> None:
    """Print on rank 0. Not with ``logging``: no ``--logging-level`` may hide which plan runs, and why."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(line, flush=True)
