"""Stand-ins for launchers, and a Python startup hook that records a launch instead of running it."""

import stat
import sys
from collections.abc import Sequence
from pathlib import Path

RECORD = "LANCET_LAUNCH_RECORD"
"""Variable with the path of the launch record, which has one line of JSON per launch."""
LAUNCHED_BY = "LANCET_LAUNCHED_BY"
"""Variable with the launcher of a process, and the launcher's options."""
LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "deepspeed", "deepspeed.launcher.runner")

_LAUNCHERS = ("torchrun", "deepspeed", "ft_launcher")
_PYTHONS = ("python", "python3")
_WRAPPERS = ("srun", "mpirun", "mpiexec", "singularity", "apptainer", "enroot", "docker", "podman")
"""Launchers and containers that run the command after their options."""
_PREFIXES = ("sudo", "numactl", "nohup")
"""Commands that run the command after their options and are not launchers."""
_WITHOUT_EFFECT = (
    *("rm", "mv", "cp", "ln", "chmod", "chown", "wget", "curl", "git", "ssh", "scp", "rsync", "pip", "pip3", "conda"),
    *("module", "sbatch", "scancel", "pkill", "killall", "kill", "sleep", "apt", "apt-get", "ray", "uv"),
)
_MAKES_FILES = ("mkdir", "touch")
_SHELLS = ("bash", "sh", "env")

_RECORDER = f'''"""Records the command line of a launch instead of running it."""
import json, os, sys
def _program(words):
    """Returns the module and file that Python runs; empty for code and standard input."""
    words = iter(words)
    for word in words:
        if word == "-m":
            return next(words, ""), ""
        if word.startswith("-m"):
            return word[2:], ""
        if not word.startswith("-"):
            return "", os.path.basename(word)
        if word == "-" or word.startswith("-c"):
            break
        if word in ("-W", "-X"):
            next(words, "")
    return "", ""
def _start():
    words = list(sys.orig_argv[1:])
    module, file = _program(words)
    launches = module in {LAUNCHER_MODULES!r} or file in {_LAUNCHERS!r}
    trains = file.startswith("pretrain") or any(word.split("=")[0] == "--num-layers" for word in words)
    launched_by = os.environ.get({LAUNCHED_BY!r}, "")
    if not (module or file) or not (launches or trains or launched_by):
        return
    line = json.dumps({{"words": words, "environment": dict(os.environ), "launched_by": launched_by}})
    try:
        record = os.open(os.environ[{RECORD!r}], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(record, line.encode() + b"\\n")
    finally:
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
seen={name}
while [ $# -gt 0 ]; do
    case "${{1##*/}}" in
        {commands}|python3.*) {mark}exec "$@" ;;
        *.py) {mark}exec {python} "$@" ;;
        *.sh) {mark}exec {bash} "$@" ;;
    esac
    seen="$seen $1"
    shift
done
"""
_MARK = f'export {LAUNCHED_BY}="$seen"; '
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
_NOTHING = "#!/bin/sh\n"
_ATTEMPT = """#!/bin/sh
{command} "$@" 2>/dev/null
exit 0
"""
"""For commands whose failure on a read-only file must not end a script that stops on errors."""


def write_stand_ins(folder: Path, bash: str, may_write: bool) -> None:
    """Writes the stand-ins into a folder.

    Args:
        may_write: whether stand-ins may create files and folders: only if this does not affect the user's.
    """
    python = folder / "python"
    (folder / "sitecustomize.py").write_text(_RECORDER)
    commands = "|".join((*_LAUNCHERS, *_PYTHONS, *_WRAPPERS, *_PREFIXES, *_SHELLS))

    def wrapper(name: str, mark: str) -> str:
        return _WRAPPER_STUB.format(name=name, commands=commands, mark=mark, python=python, bash=folder / "bash")

    names = {
        **dict.fromkeys(_LAUNCHERS, _LAUNCHER_STUB.format(python=python)),
        **dict.fromkeys(_PYTHONS, _PYTHON_STUB.format(folder=folder, python=sys.executable)),
        **{name: wrapper(name, _MARK) for name in _WRAPPERS},
        **{name: wrapper(name, "") for name in _PREFIXES},
        **dict.fromkeys(_WITHOUT_EFFECT, _NOTHING),
        **{name: _ATTEMPT.format(command=f"/bin/{name}") if may_write else _NOTHING for name in _MAKES_FILES},
        **dict.fromkeys(("sh", "bash"), _SHELL_STUB.format(bash=bash)),
        "tee": _TEE_STUB,
        "nvidia-smi": _GPUS_STUB,
        "scontrol": _HOSTS_STUB,
    }
    for name, text in names.items():
        file = folder / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)


def program_of(words: Sequence[str]) -> int | None:
    """Returns the index of the training program in a launch, a Python file or module name; None without one."""
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        if word.endswith(".py") or (before in ("-m", "--module") and word not in LAUNCHER_MODULES):
            return index
    return None
