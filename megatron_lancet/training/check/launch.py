"""What a launch script would start: it is run with stand-ins for launchers, which write their command line down.

Nothing is trained, installed, downloaded or removed: commands that do so are stand-ins as well. The script runs in a
folder of its own, where the files of the current folder are seen.
"""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_lancet.errors import UsageError

_LIMIT_S = 60.0
_RECORD = "LANCET_LAUNCH_RECORD"
_LAUNCHERS = ("torchrun", "deepspeed", "ft_launcher")
_PYTHONS = ("python", "python3")
_WRAPPERS = ("srun", "mpirun", "mpiexec", "singularity", "apptainer", "enroot", "docker", "sudo")
_WITHOUT_EFFECT = (
    *("rm", "mkdir", "mv", "cp", "ln", "chmod", "chown", "touch", "wget", "curl", "git", "ssh", "scp", "rsync", "pip"),
    *(
        "pip3",
        "conda",
        "module",
        "sbatch",
        "scancel",
        "pkill",
        "killall",
        "kill",
        "sleep",
        "apt",
        "apt-get",
        "ray",
        "uv",
    ),
)
_SHELLS = ("bash", "sh", "env", "numactl")
_OWN_VARIABLES = ("PWD", "OLDPWD", "SHLVL", "_", "PATH", "PYTHONPATH", "SHELLOPTS", _RECORD)

_OF_A_CLUSTER = {
    **{"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "NODE_RANK": "0", "RDZV_ENDPOINT": "localhost:29500"},
    **{"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "localhost"},
}
"""Variables that schedulers set and scripts read, where they are not set here."""

_RECORDER = f'''"""Writes the command line of a launch down, in place of what it starts."""
import json, os, sys
def _start():
    words = list(sys.orig_argv[1:])
    launches = any(word in ("torch.distributed.run", "torch.distributed.launch", "deepspeed") for word in words)
    launches = launches or any(os.path.basename(word) in {_LAUNCHERS!r} for word in words[:3])
    trains = any(os.path.basename(word).startswith("pretrain") and word.endswith(".py") for word in words)
    if launches or trains:
        record = os.environ.get({_RECORD!r})
        if record and not os.path.exists(record):
            with open(record, "w") as file:
                json.dump({{"words": words, "environment": dict(os.environ)}}, file)
        os._exit(0)
_start()
'''
_LAUNCHER_STUB = """#!/bin/sh
exec {python} -m torch.distributed.run "$@"
"""
_PYTHON_STUB = """#!/bin/sh
PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}} exec {python} "$@"
"""
_WRAPPER_STUB = """#!/bin/sh
while [ $# -gt 0 ]; do
    case "${{1##*/}}" in
        {commands}) exec "$@" ;;
    esac
    shift
done
"""
_GPUS_STUB = """#!/bin/sh
for gpu in 0 1 2 3 4 5 6 7; do echo "GPU $gpu"; done
"""
_HOSTS_STUB = """#!/bin/sh
echo localhost
"""
_SHELL_STUB = """#!{bash}
exec {bash} "$@"
"""
_TEE_STUB = """#!/bin/sh
exec cat
"""
_NO_CLOBBER = {"SHELLOPTS": "noclobber"}
"""Makes bash refuse to write over files: the script must not empty the log of an earlier run."""


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


def read_launch(words: Sequence[str]) -> Launch:
    """Reads a launch: a script and its arguments, or flags of Megatron.

    Raises:
        UsageError: there is no such script, or it starts no training.
    """
    if not words:
        raise UsageError("expected a launch script, or flags of Megatron, found nothing.")
    if words[0].startswith("--"):
        size = os.environ.get("WORLD_SIZE", "")
        return Launch(list(words), int(size) if size.isdecimal() else None, {})
    script = Path(words[0])
    if not script.is_file():
        raise UsageError(f"there is no launch script {script}. Pass a file, or flags of Megatron.")
    return launch_of_script(script, words[1:])


def launch_of_script(script: Path, arguments: Sequence[str]) -> Launch:
    """Runs a script with stand-ins for everything that it starts.

    Raises:
        UsageError: it starts no training within a minute.
    """
    with tempfile.TemporaryDirectory(prefix="lancet-launch") as name:
        folder = Path(name)
        record = folder / "record.json"
        stubs = _write_stand_ins(folder)
        work = folder / "work"
        work.mkdir()
        for entry in Path.cwd().iterdir():
            (work / entry.name).symlink_to(entry)
        path = os.pathsep.join([str(stubs), os.environ.get("PATH", "")])
        python_path = os.pathsep.join([str(stubs), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PATH": path, "PYTHONPATH": python_path, _RECORD: str(record), **_NO_CLOBBER}
        output = _run([_bash(), str(script.absolute()), *arguments], {**_OF_A_CLUSTER, **os.environ, **own}, work)
        if not record.exists():
            tail = " ".join(output.strip().splitlines()[-2:]) or "nothing"
            raise UsageError(
                f"{script} started no training: expected torchrun, python -m torch.distributed.run, or python "
                f"pretrain_*.py. It printed: {tail}"
            )
        found = json.loads(record.read_text())
    return _launch(found["words"], found["environment"], script)


def _bash() -> str:
    found = shutil.which("bash")
    if found is None:
        raise UsageError("launch scripts are run by bash, which is not installed. Pass the flags of Megatron instead.")
    return found


def _run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=_LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        raise UsageError(f"{command[1]} still ran after {_LIMIT_S:g} s, without any training.") from None
    finally:
        with suppress(ProcessLookupError):  # also what the script left in the background
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _write_stand_ins(folder: Path) -> Path:
    stubs = folder / "stubs"
    stubs.mkdir()
    (stubs / "sitecustomize.py").write_text(_RECORDER)
    commands = "|".join((*_LAUNCHERS, *_PYTHONS, *_SHELLS))
    names = {
        **dict.fromkeys(_LAUNCHERS, _LAUNCHER_STUB.format(python=stubs / "python")),
        **dict.fromkeys(_PYTHONS, _PYTHON_STUB.format(folder=stubs, python=sys.executable)),
        **dict.fromkeys(_WRAPPERS, _WRAPPER_STUB.format(commands=commands)),
        **dict.fromkeys(_WITHOUT_EFFECT, "#!/bin/sh\n"),
        **dict.fromkeys(("sh", "bash"), _SHELL_STUB.format(bash=_bash())),
        "tee": _TEE_STUB,
        "nvidia-smi": _GPUS_STUB,
        "scontrol": _HOSTS_STUB,
    }
    for name, text in names.items():
        file = stubs / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return stubs


def _launch(words: list[str], environment: Mapping[str, str], script: Path) -> Launch:
    position = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if position is None:
        raise UsageError(f"{script} starts no Python file: found {' '.join(words)}")
    launcher, flags = words[:position], words[position + 1 :]
    changed = {
        name: value
        for name, value in environment.items()
        if os.environ.get(name, _OF_A_CLUSTER.get(name)) != value and name not in _OWN_VARIABLES
    }
    return Launch(flags, _num_ranks(launcher, environment), changed)


def _num_ranks(words: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Ranks that torchrun's options ask for; else those of the environment; None if neither says."""
    options = dict(re.findall(r"--(nnodes|nproc[-_]per[-_]node|num[-_]nodes|num[-_]gpus)[ =](\S+)", " ".join(words)))
    options = {name.replace("_", "-"): value for name, value in options.items()}
    per_node = options.get("nproc-per-node", options.get("num-gpus"))
    if per_node is not None and per_node.isdecimal():
        nodes = str(options.get("nnodes") or options.get("num-nodes") or 1).split(":")[-1]
        return int(per_node) * (int(nodes) if nodes.isdecimal() else 1)
    size = environment.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() and not words else None
