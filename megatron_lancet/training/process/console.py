"""Prints lines of a run on standard output, next to Megatron's own log, once for all ranks."""

from megatron_lancet.files.report_folder import is_rank_0


def say(line: str) -> None:
    """Print on rank 0. Not with ``logging``: no ``--logging-level`` may hide which plan runs, and why."""
    if is_rank_0():
        print(line, flush=True)
