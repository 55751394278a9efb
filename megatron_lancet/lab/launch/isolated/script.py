"""Runs a launch script in isolation, with stand-ins for what it starts; it can change nothing outside a folder."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.launch.isolated import pbs, remote, sandbox
from megatron_lancet.lab.launch.isolated.launchers import STAND_INS, Launcher, read_launchers
from megatron_lancet.lab.launch.isolated.stand_ins import BASH_ENV, RECORD, START, write_stand_ins

LIMIT_S = 60.0
_POLL_S = 0.2
_NO_CLOBBER = {"SHELLOPTS": "noclobber"}
"""Makes bash refuse to overwrite files: without isolation, the script must not empty the log of an earlier run."""


_FAILED = "failed"
"""Start of a line of the record that notes a failed command."""


class NotIsolatedError(Exception):
    """The machine cannot isolate the script, which did not run; the text gives the reason."""


@dataclass(frozen=True)
class Started:
    """A program that a script started.

    Attributes:
        words: command line after Python's name.
        launched_by: its launchers, outermost first.
    """

    words: list[str]
    environment: Mapping[str, str]
    launched_by: list[Launcher]


@dataclass(frozen=True)
class Failed:
    """A command of a script that failed.

    Attributes:
        line: in the file.
    """

    status: int
    file: str
    line: int
    command: str


@dataclass(frozen=True)
class Outcome:
    """What a script did.

    Attributes:
        started: launches, in order.
        failed: commands that failed, in order.
    """

    started: list[Started]
    failed: list[Failed]
    output: str


def run_script(script: Path, arguments: Sequence[str], defaults: Mapping[str, str], isolated: bool) -> Outcome:
    """Runs a script.

    Args:
        defaults: variables to set if the environment lacks them.
        isolated: whether it runs in its own namespaces, with read-only files and no network.

    Raises:
        NotIsolatedError: this machine cannot isolate it.
        UsageError: the script runs for more than a minute without a launch, or bash is not installed.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise UsageError("launch scripts need bash, which is not installed. Pass Megatron's flags instead.")
    with tempfile.TemporaryDirectory(prefix="lancet-launch") as name, tempfile.TemporaryFile() as record:
        folder = Path(name).resolve()
        stubs, scratch = folder / "stubs", folder / "scratch"
        stubs.mkdir()
        scratch.mkdir()
        write_stand_ins(stubs, bash, script.read_text(errors="replace"), scratch, may_write=isolated)
        job = stubs / remote.FILES
        job.mkdir()
        (job / remote.ENVIRONMENT).write_text(json.dumps(dict(os.environ)))
        environment = {**defaults, **os.environ, **_variables(stubs, scratch, isolated)}
        environment |= pbs.node_file(environment, job)
        command = [bash, str(script.absolute()), *arguments]
        if isolated:
            text, output, is_over = _run_isolated(command, environment, scratch, record)
        else:
            text, output, is_over = _run_trusted(command, environment, scratch)
    lines = text.splitlines()
    started = [_started(line, script) for line in lines if not line.startswith(_FAILED)]
    if is_over and not started:
        raise UsageError(f"{script} ran for over {LIMIT_S:g} s without any training. Pass Megatron's flags.")
    failed = [found for line in lines if (found := _failed(line)) is not None]
    return Outcome(started, failed, output)


def _variables(stubs: Path, scratch: Path, isolated: bool) -> dict[str, str]:
    """Returns the variables that select the stand-ins."""
    return {
        "PATH": os.pathsep.join([str(stubs), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([str(stubs), *filter(None, [os.environ.get("PYTHONPATH")])]),
        RECORD: str(scratch / sandbox.RECORD),
        STAND_INS: str(stubs),
        "BASH_ENV": str(stubs / START),
        BASH_ENV: os.environ.get("BASH_ENV", ""),
        "TMPDIR": str(scratch / sandbox.TEMPORARY),
        **({} if isolated else _NO_CLOBBER),
    }


def _run_isolated(
    command: list[str], environment: dict[str, str], scratch: Path, record: IO[bytes]
) -> tuple[str, str, bool]:
    """Returns the record, the output, and whether the command was ended at the limit."""
    if sys.platform != "linux":
        raise NotIsolatedError("the system is not Linux")
    helper = [sys.executable, "-I", "-S", sandbox.__file__, str(scratch), str(record.fileno())]
    status, output = _run([*helper, *command], environment, Path.cwd(), (record.fileno(),))
    record.seek(0)
    text = record.read().decode(errors="replace")
    if status:
        reason = output.strip()
        with suppress(ValueError, KeyError, TypeError):
            reason = json.loads(text)["error"]
        raise NotIsolatedError(reason or f"status {status}")
    return text, output, status is None


def _run_trusted(command: list[str], environment: dict[str, str], scratch: Path) -> tuple[str, str, bool]:
    """Like :func:`_run_isolated`, without the isolation."""
    work = scratch / sandbox.WORK
    work.mkdir()
    (scratch / sandbox.TEMPORARY).mkdir()
    sandbox.link_entries(Path.cwd(), work)
    status, output = _run(command, environment, work)
    record = scratch / sandbox.RECORD
    return record.read_text(errors="replace") if record.is_file() else "", output, status is None


def _run(
    command: list[str], environment: dict[str, str], folder: Path, descriptors: tuple[int, ...] = ()
) -> tuple[int | None, str]:
    """Returns the exit status, None for a command that was ended at the limit, and the output."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=descriptors,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    status: int | None = None
    end_s = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < end_s:
            with suppress(subprocess.TimeoutExpired):
                output, _ = process.communicate(timeout=_POLL_S)
                return process.returncode, output
            if status is None and (status := process.poll()) is not None:
                end_s = min(end_s, time.monotonic() + sandbox.GRACE_S)
        process.terminate()  # the sandbox then writes its record
        with suppress(subprocess.TimeoutExpired):
            process.wait(sandbox.GRACE_S)
    finally:
        with suppress(ProcessLookupError):  # includes the script's background processes
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    output = ""
    with suppress(subprocess.TimeoutExpired):  # a process that has left the session still has the pipe
        output, _ = process.communicate(timeout=sandbox.GRACE_S)
    return status, output


def _failed(line: str) -> Failed | None:
    found = re.fullmatch(rf"{_FAILED}\t(\d+)\t(.*)\t(\d+)\t(.*)", line)
    return Failed(int(found[1]), found[2], int(found[3]), found[4].replace("\\", "")) if found else None


def _started(line: str, script: Path) -> Started:
    try:
        found: dict[str, Any] = json.loads(line)
        return Started(list(found["words"]), dict(found["environment"]), read_launchers(found["launched_by"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{script} wrote to the record of its launches ({RECORD}). Remove that write.") from error
