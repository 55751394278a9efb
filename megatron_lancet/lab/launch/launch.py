"""Finds the training of a launch script: runs it with stand-ins for launchers, which record their command line.

The script runs in its own namespaces (:mod:`sandbox`), with read-only files and no network. Commands without a stand-in
therefore have no effect either. If this is impossible, the user is asked.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_lancet.config import FLAGS_VARIABLE, OWN_SPEC
from megatron_lancet.errors import UsageError
from megatron_lancet.lab.launch.failure import describe_failure
from megatron_lancet.lab.launch.flag_file import flags_in
from megatron_lancet.lab.launch.isolated import pbs, slurm
from megatron_lancet.lab.launch.isolated.launchers import LAUNCHED_BY, STAND_INS
from megatron_lancet.lab.launch.isolated.script import NotIsolatedError, Started, run_script
from megatron_lancet.lab.launch.isolated.stand_ins import BASH_ENV, RECORD
from megatron_lancet.lab.launch.ranks import Program, program_of, ranks_of
from megatron_lancet.patching import replaced

TRUST_FLAG = "--trust-script"
_OWN_VARIABLES = (
    *("PWD", "OLDPWD", "SHLVL", "_", "PATH", "PYTHONPATH", "SHELLOPTS", "TMPDIR"),
    *(RECORD, LAUNCHED_BY, STAND_INS, BASH_ENV, "BASH_ENV", slurm.FACTS, pbs.HOSTS),
)
_OF_A_LAUNCHER = ("SLURM_", "SLURMD_", "OMPI_", "PMI_", "PBS_")
"""Starts of names of variables that launchers set."""
_OF_A_MODEL = ("--num-layers", "--use-checkpoint-args", "--yaml-cfg")
"""Flags that distinguish a Megatron training from other programs that a script launches."""

_OF_A_CLUSTER = {
    **{"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "NODE_RANK": "0", "RDZV_ENDPOINT": "localhost:29500"},
}
"""Variables that schedulers set and scripts read, where they are not set here; for SLURM's see :mod:`slurm`."""


_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """A training run, as a script would start it.

    Attributes:
        words: command line of the training script.
        num_ranks: that the launcher would start; None if it does not say.
        environment: variables that the script sets or changes.
        ranks_from: for the user: the source of the number of ranks; empty without a number.
    """

    words: list[str]
    num_ranks: int | None
    environment: Mapping[str, str]
    ranks_from: str = ""

    def set_environment(self) -> None:
        """Sets the variables of the script in this process, but not those by which a launcher numbers ranks."""
        os.environ.update({name: value for name, value in self.environment.items() if name not in _OF_RANKS})


def read_launch(words: Sequence[str], trusted: bool = False) -> Launch:
    """Reads a launch: a script and its arguments, or flags of Megatron.

    Args:
        trusted: whether the script runs with the user's rights, without isolation.

    Raises:
        UsageError: the script is missing, starts no training, or is not trusted and can't be isolated.
    """
    if not words:
        raise UsageError("expected a launch script, or flags of Megatron, found nothing.")
    if words[0].startswith("--"):
        return _launch_of_flags(words)
    script = Path(words[0])
    if not script.is_file():
        raise UsageError(f"there is no launch script {script}. Pass a file, or flags of Megatron.")
    if script.suffix == ".py":
        return _launch_of_flags(words[1:])
    if b"\0" in script.read_bytes():
        raise UsageError(f"{script} is no text: expected a launch script, or a file of flags of Megatron.")
    flags = flags_in(script)
    if flags is not None:
        return _launch_of_flags([*flags, *words[1:]])
    return launch_of_script(script, words[1:], trusted)


def _launch_of_flags(words: Sequence[str]) -> Launch:
    size = slurm.leading(os.environ.get("WORLD_SIZE", ""))
    return _by_own_script(Launch(list(words), size, {}, "" if size is None else "WORLD_SIZE"), os.environ)


def _by_own_script(launch: Launch, environment: Mapping[str, str]) -> Launch:
    """The same launch by this project's script, if it is by Megatron's with ``--spec``, where a variable has flags.

    Raises:
        UsageError: a quotation in the variable has no end.
    """
    for index in range(len(launch.words)):
        if launch.words[index : index + 3] == ["--spec", *OWN_SPEC]:
            try:
                flags = shlex.split(environment.get(FLAGS_VARIABLE, ""))
            except ValueError as error:
                raise UsageError(f"{FLAGS_VARIABLE}: {error}. Close it.") from error
            others = {name: value for name, value in launch.environment.items() if name != FLAGS_VARIABLE}
            words = [*launch.words[:index], *launch.words[index + 3 :], *flags]
            return replace(launch, words=words, environment=others)
    return launch


def launch_of_script(script: Path, arguments: Sequence[str], trusted: bool = False) -> Launch:
    """Runs a script with stand-ins for everything that it starts.

    Raises:
        UsageError: it starts no training within a minute, or is not trusted and can't be isolated.
    """
    text = _text_of(script)
    defaults = _defaults(script, text)
    try:
        outcome = run_script(script, arguments, defaults, isolated=not trusted)
    except NotIsolatedError as error:
        _ask(script, str(error))
        outcome = run_script(script, arguments, defaults, isolated=False)
    if not outcome.started:
        raise UsageError(describe_failure(script, outcome))
    started = _training(outcome.started)
    program = program_of(started.words)
    if program is None:
        if outcome.failed:
            raise UsageError(describe_failure(script, outcome))
        found = " ".join(started.words)
        raise UsageError(f"{script} starts no Python file: found {found}. Look for an option that has no value.")
    return _launch(started, program, text, defaults)


def _text_of(script: Path) -> str:
    """Returns the text of a script, and of the files that it names behind ``source`` and ``bash``."""
    text = script.read_text(errors="replace")
    texts = [text]
    for name in re.findall(r"^\s*(?:source|\.|bash|sh)\s+[\"']?([\w./-]+)", text, flags=re.MULTILINE):
        if Path(name).is_file():
            texts.append(Path(name).read_text(errors="replace"))
    return "\n".join(texts)


def _defaults(script: Path, text: str) -> dict[str, str]:
    """Returns the variables of a job of the script, as the scheduler sets them."""
    own, folder = script.read_text(errors="replace"), str(Path.cwd())
    others = {name: value for name, value in _OF_A_CLUSTER.items() if not slurm.has_own_default(text, name)}
    of_pbs = None if slurm.directives(own) else pbs.job_of(own, os.environ, folder)
    if of_pbs is not None:
        return {**others, **of_pbs.variables, slurm.FACTS: slurm.written_facts(of_pbs.facts)}
    job = slurm.job_of(own, os.environ, folder)
    return {**others, **job.assumed_in(text), **job.given, slurm.FACTS: slurm.written_facts(job.facts)}


@contextmanager
def as_dry_run(launch: Launch, *flags: str) -> Iterator[None]:
    """Sets the command line and the environment of the launch, for a dry run in one process.

    Args:
        flags: stand in front of its own.
    """
    words = ["pretrain_gpt_moe.py", "--lancet-dry-run", *flags, *launch.words]
    environment = dict(os.environ)
    os.environ.update(launch.environment)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    try:
        with replaced(sys, "argv", words):
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _ask(script: Path, reason: str) -> None:
    """Asks the user whether a script may run without isolation.

    Raises:
        UsageError: the user declines, or there is no terminal.
    """
    needed = (
        f"{script} must run to find its training, but can't be isolated from your files and network here ({reason})"
    )
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"{needed}. Run it anyway? [y/N] ", end="", file=sys.stderr, flush=True)  # noqa: T201
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
        raise UsageError(f"{script} was not run. Pass Megatron's flags instead.")
    raise UsageError(f"{needed}. Pass {TRUST_FLAG} if you trust the script, or pass Megatron's flags instead.")


def _training(started: Sequence[Started]) -> Started:
    """Returns the first program with a model's flags, else the first program."""
    have_model = (one for one in started if any(word.partition("=")[0] in _OF_A_MODEL for word in one.words))
    return next(have_model, started[0])


def _launch(started: Started, program: Program, text: str, defaults: Mapping[str, str]) -> Launch:
    changed = {
        name: value
        for name, value in started.environment.items()
        if os.environ.get(name, defaults.get(name)) != value
        and name not in _OWN_VARIABLES
        and not name.startswith(_OF_A_LAUNCHER)
    }
    ranks = ranks_of(started, program, text)
    size, source = (None, "") if ranks is None else (ranks.value, ranks.source)
    return _by_own_script(Launch(program.arguments, size, changed, source), started.environment)
