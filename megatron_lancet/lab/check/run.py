"""``lancet check``: from the command line to a report."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from megatron_lancet.errors import UsageError
from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.lab.check.check import Verdict, check
from megatron_lancet.lab.check.ranks import FailedRunError, RefusedRunError
from megatron_lancet.lab.check.report import record, report
from megatron_lancet.lab.check.shrink import shrink
from megatron_lancet.lab.check.words import read_command_line
from megatron_lancet.lab.launch.launch import read_launch
from megatron_lancet.training.platform.detect import has_transformer_engine
from megatron_lancet.training.process.console import say

EXIT_CODES = {Verdict.EQUAL: 0, Verdict.DIFFERS: 1, Verdict.NOT_COMPARED: 3}
"""Exit status of each verdict. Status 2 means that the launch was not checked."""


def run_check(options: argparse.Namespace, launch_words: list[str]) -> int:
    """Checks a launch; returns the exit status from :data:`EXIT_CODES`.

    Raises:
        UsageError: there is no such launch, or it is not checked or refused.
    """
    start_s = time.monotonic()
    launch = read_launch(launch_words, options.trust_script)
    if options.te and not has_transformer_engine():
        raise UsageError(
            "--te: Transformer Engine can't be imported here: its kernels need a GPU, and the ranks of a check are "
            "processes on CPUs. Drop it: local layers are checked in place of Transformer Engine's."
        )
    if launch.num_ranks is not None:
        say(f"the launch has {launch.num_ranks} ranks ({launch.ranks_from})")
    line = read_command_line(launch.words)
    shrunk = shrink(line, launch.num_ranks, options.max_ranks, options.padding, options.te)
    with tempfile.TemporaryDirectory(prefix="lancet-check") as folder:
        try:
            finding = check(
                shrunk,
                Path(folder),
                not options.stock_only,
                timeout_s=options.timeout_s,
                padding=options.padding,
                say=_show_progress,
            )
        except RefusedRunError as error:
            raise UsageError(f"the shrunk launch ({shrunk.layout}) does not run: {error}") from error
        except FailedRunError as error:
            *lines, last = str(error).strip().splitlines()
            say("\n".join(lines))
            raise UsageError(f"the shrunk launch ({shrunk.layout}) fails: {last}") from error
    seconds = time.monotonic() - start_s
    say(report(finding, seconds))
    if options.json is not None:
        atomic_write(options.json, json.dumps(record(finding, seconds), indent=1) + "\n")
    return EXIT_CODES[finding.verdict]


def _show_progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"  {line}", file=sys.stderr, flush=True)  # noqa: T201
