"""Finds the training of a launch script: runs it with stand-ins for launchers, which record their command line.

The script runs in its own namespaces (:mod:`sandbox`), with read-only files and no network. Commands without a stand-in
therefore have no effect either. If this is impossible, the user is asked.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.launch.isolated.script import NotIsolatedError, Started, run_script
from megatron_lancet.lab.launch.isolated.stand_ins import LAUNCHED_BY, RECORD, program_of
from megatron_lancet.patching import replaced

TRUST_FLAG = "--trust-script"
_OWN_VARIABLES = (
    *("PWD", "OLDPWD", "SHLVL", "_", "PATH", "PYTHONPATH", "SHELLOPTS", "TMPDIR"),
    *(RECORD, LAUNCHED_BY),
)
_OF_A_MODEL = ("--num-layers", "--use-checkpoint-args", "--yaml-cfg")
"""Flags that distinguish a Megatron training from other programs that a script launches."""

_OF_A_CLUSTER = {
    **{"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "NODE_RANK": "0", "RDZV_ENDPOINT": "localhost:29500"},
    **{"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "localhost"},
}
"""Variables that schedulers set and scripts read, where they are not set here."""


_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """A training run, as a script would start it.

    Attributes:
        words: command line of the training script.
        num_ranks: that the launcher would start; None if it does not say.
        environment: variables that the script sets or changes.
    """

    words: list[str]
    num_ranks: int | None
    environment: Mapping[str, str]

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
        size = os.environ.get("WORLD_SIZE", "")
        return Launch(list(words), int(size) if size.isdecimal() else None, {})
    script = Path(words[0])
    if not script.is_file():
        raise UsageError(f"there is no launch script {script}. Pass a file, or flags of Megatron.")
    return launch_of_script(script, words[1:], trusted)


def launch_of_script(script: Path, arguments: Sequence[str], trusted: bool = False) -> Launch:
    """Runs a script with stand-ins for everything that it starts.

    Raises:
        UsageError: it starts no training within a minute, or is not trusted and can't be isolated.
    """
    try:
        started, output = run_script(script, arguments, _OF_A_CLUSTER, isolated=not trusted)
    except NotIsolatedError as error:
        _ask(script, str(error))
        started, output = run_script(script, arguments, _OF_A_CLUSTER, isolated=False)
    if not started:
        tail = " ".join(output.strip().splitlines()[-2:]) or "nothing"
        raise UsageError(
            f"{script} started no training: expected torchrun, python -m torch.distributed.run, srun or mpirun with a "
            f"Python file, or python pretrain_*.py. It printed: {tail}"
        )
    return _launch(_training(started), script)


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


def _launch(started: Started, script: Path) -> Launch:
    position = program_of(started.words)
    if position is None:
        raise UsageError(f"{script} starts no Python file: found {' '.join(started.words)}")
    changed = {
        name: value
        for name, value in started.environment.items()
        if os.environ.get(name, _OF_A_CLUSTER.get(name)) != value and name not in _OWN_VARIABLES
    }
    return Launch(started.words[position + 1 :], _num_ranks(started, position), changed)


def _num_ranks(started: Started, position: int) -> int | None:
    """Returns the ranks set by torchrun's options, else by its launcher or the environment; None if none sets them."""
    words = " ".join(started.words[:position])
    options = dict(re.findall(r"--(nnodes|nproc[-_]per[-_]node|num[-_]nodes|num[-_]gpus)[ =](\S+)", words))
    options = {name.replace("_", "-"): value for name, value in options.items()}
    per_node = options.get("nproc-per-node", options.get("num-gpus"))
    if per_node is not None and per_node.isdecimal():
        nodes = str(options.get("nnodes") or options.get("num-nodes") or 1).split(":")[-1]
        return int(per_node) * (int(nodes) if nodes.isdecimal() else 1)
    if any(word in words for word in ("torch.distributed", "deepspeed")):
        return None
    tasks = re.findall(r"(?:^|\s)(?:-n|-np|--np|--ntasks)[ =]?(\d+)(?=\s|$)", started.launched_by)
    sizes = [*tasks, started.environment.get("WORLD_SIZE", ""), started.environment.get("SLURM_NTASKS", "")]
    return next((int(size) for size in sizes if size.isdecimal()), None)
