"""Stand-ins for launchers, and a Python startup hook that records a launch instead of running it."""

import re
import shlex
import stat
import sys
from collections.abc import Collection
from pathlib import Path

from megatron_lancet.lab.launch.isolated import launchers
from megatron_lancet.lab.launch.isolated.launchers import LAUNCHED_BY, STAND_INS

_ROOT = Path(__file__).parents[4]

RECORD = "LANCET_LAUNCH_RECORD"
"""Variable with the path of the launch record, which has one line of JSON per launch."""
BASH_ENV = "LANCET_BASH_ENV"
"""Variable with the user's own ``BASH_ENV``."""
START = "start.bash"
"""Name of the file that every bash reads first."""
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
DEEPSPEED_MODULES = ("deepspeed", "deepspeed.launcher.runner")
ACCELERATE_MODULES = ("accelerate.commands.launch",)
LAUNCHER_MODULES = (*TORCHRUN_MODULES, *DEEPSPEED_MODULES, *ACCELERATE_MODULES)
LAUNCHER_FILES = ("torchrun", "ft_launcher", "deepspeed")

_PYTHONS = ("python", "python3", *(f"python3.{minor}" for minor in range(8, 16)))
_WITHOUT_EFFECT = (
    *("rm", "mv", "cp", "ln", "chown", "wget", "curl", "git", "scp", "rsync", "pip", "pip3", "ssh-keygen"),
    *("module", "scancel", "squeue", "sacct", "sinfo", "pkill", "killall", "kill", "sleep", "apt", "apt-get", "ray"),
)
_MAKES_FILES = ("mkdir", "touch", "chmod")

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
    launches = module in {LAUNCHER_MODULES!r} or file in {LAUNCHER_FILES!r}
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
_TORCHRUN_STUB = """#!/bin/sh
exec {python} -m torch.distributed.run "$@"
"""
_PYTHON_STUB = """#!/bin/sh
PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}} exec {python} "$@"
"""
_LAUNCHER_STUB = """#!/bin/sh
exec {python} -E -s -S -c 'import sys; sys.path.insert(0, sys.argv.pop(1)); from {module} import main; main()' \\
    {root} {name} "$@"
"""
_GPUS_STUB = """#!/bin/sh
gpu=0
while [ $gpu -lt "${SLURM_GPUS_ON_NODE:-8}" ]; do echo "GPU $gpu"; gpu=$((gpu + 1)); done
"""
_HOSTNAME_STUB = """#!/bin/sh
case "$1" in -i|-I|--ip-address|--all-ip-addresses) echo 127.0.0.1 ;; *) echo localhost ;; esac
"""
_SHELL_STUB = """#!{bash}
case "${{1:-}}" in
    -l|--login) shift ;;
    -lc|-cl|-lic|-ilc|-ic) shift; set -- -c "$@" ;;
esac
exec {bash} "$@"
"""
"""A login shell would reset ``PATH``."""
_MKTEMP_STUB = """#!/bin/sh
for word in "$@"; do
    case "$word" in -d|--directory|-[a-z]d) exec /bin/mktemp "$@" ;; esac
done
exec /bin/mktemp -u "$@"
"""
"""Makes no file, which a script that may not overwrite files could not fill."""
_OWN_FILES_STUB = """#!/bin/sh
mode=$1
shift
for file in "$@"; do
    case "$(readlink -f "$file")" in {scratch}/*) /bin/chmod "$mode" "$file" ;; esac
done
exit 0
"""
_BASH_START = """
if [ -n "${{{other}:-}}" ]; then . "${other}"; fi
cd() {{ builtin cd "$@" 2>/dev/null || builtin cd {instead}; }}
pushd() {{ builtin pushd "$@" 2>/dev/null || builtin pushd {instead} >/dev/null; }}
set -ET
trap 'printf "failed\\t%s\\t%s\\t%s\\t%q\\n" \
    "$?" "${{BASH_SOURCE[0]:-$0}}" "$LINENO" "$BASH_COMMAND" >> "${record}"' ERR
trap '{{ case "$PATH" in "${stubs}":*) ;; *) PATH=${stubs}:$PATH ;; esac; \
    case "${{PYTHONPATH-}}" in "${stubs}"*) ;; *) export PYTHONPATH=${stubs}${{PYTHONPATH:+:$PYTHONPATH}} ;; esac; \
    }} 2>/dev/null' DEBUG
"""
"""Every bash reads it first: it notes commands that fail, and goes on without folders that only the cluster has.

Before each command, stand-ins are first again: a script that activates a virtual environment would start its launcher.
"""
_TEE_STUB = """#!/bin/sh
exec cat
"""
_NOTHING = "#!/bin/sh\n"
_NOT_HERE = """#!/bin/sh
echo "the command of {name} was not run: without isolation it would change this machine" >&2
"""
_ATTEMPT = """#!/bin/sh
{command} "$@" 2>/dev/null
exit 0
"""
"""For commands whose failure on a read-only file must not end a script that stops on errors."""


def write_stand_ins(folder: Path, bash: str, script: str, scratch: Path, may_write: bool) -> None:
    """Writes the stand-ins into a folder.

    Args:
        script: text of the launch script.
        scratch: the folder to which the script may write.
        may_write: whether stand-ins may create files and folders: only if this does not affect the user's.
    """
    python = folder / "python"
    (folder / "sitecustomize.py").write_text(_RECORDER)
    instead = folder / "instead"
    instead.mkdir()
    start = _BASH_START.format(
        **{"other": BASH_ENV, "stubs": STAND_INS, "record": RECORD},
        instead="." if may_write else shlex.quote(str(instead)),  # what follows may delete files
    )

    def launcher(name: str) -> str:
        words = {"python": sys.executable, "module": launchers.__name__, "root": shlex.quote(str(_ROOT)), "name": name}
        return _LAUNCHER_STUB.format(**words)

    names = {
        **dict.fromkeys(_WITHOUT_EFFECT, _NOTHING),
        **dict.fromkeys(LAUNCHER_FILES[:2], _TORCHRUN_STUB.format(python=python)),
        **dict.fromkeys(_PYTHONS, _PYTHON_STUB.format(folder=folder, python=sys.executable)),
        **{name: launcher(name) for name in launchers.NAMES},
        **{name: _ATTEMPT.format(command=f"/bin/{name}") if may_write else _NOTHING for name in _MAKES_FILES},
        **({} if may_write else {name: _NOT_HERE.format(name=name) for name in ("ssh", "pdsh")}),
        **({} if may_write else {"mktemp": _MKTEMP_STUB, "chmod": _OWN_FILES_STUB.format(scratch=scratch)}),
        **dict.fromkeys(("sh", "bash"), _SHELL_STUB.format(bash=bash)),
        "tee": _TEE_STUB,
        "nvidia-smi": _GPUS_STUB,
        "hostname": _HOSTNAME_STUB,
    }
    (folder / START).write_text(start + _absent_commands(script, folder, names))
    for name, text in names.items():
        file = folder / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)


def _absent_commands(script: str, folder: Path, names: Collection[str]) -> str:
    """Returns bash functions for full paths of launchers that are not on this machine."""
    paths = {path for path in re.findall(r"(?<![\w$}./~])/[\w./+-]+", script) if Path(path).name in names}
    return "".join(
        f'{path}() {{ {shlex.quote(str(folder / Path(path).name))} "$@"; }}\n'
        for path in sorted(paths)
        if not Path(path).exists()
    )
