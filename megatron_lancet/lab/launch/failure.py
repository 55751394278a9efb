"""The message for a launch script that starts no training: the line that failed, and what to do."""

import re
from pathlib import Path

from megatron_lancet.lab.launch.isolated.script import Outcome

_HINTS = (
    (r"\\r|\r", r"The file has line ends of Windows: sed -i 's/\\r$//' removes them."),
    (r"(\w+): unbound variable", r"Set it, as your cluster does: \1=VALUE lancet ..."),
    (r"(?:^|\s)--?[\w-]+: command not found", r"The line before it lacks a \\ at its end."),
    (r"(\S+): command not found", r"\1 is not on this machine. Pass Megatron's flags instead."),
    (r"cannot overwrite existing file", "Without isolation a script may not overwrite files. Move the file away."),
    (r"Read-only file system", "Let the script write to the current folder, $HOME or $TMPDIR."),
    (r"(\S+): No such file or directory", r"\1 is not on this machine. Pass Megatron's flags instead."),
    (r"syntax error|unexpected", "Bash can't read the script: bash -n shows where."),
)
_EXPECTED = (
    "expected torchrun, python -m torch.distributed.run, srun, mpirun, deepspeed or accelerate launch with a Python "
    "file, or python pretrain_*.py."
)


def describe_failure(script: Path, outcome: Outcome) -> str:
    """Returns one line for the user."""
    lines = outcome.output.strip().splitlines()
    tail = " ".join(lines[-2:]) or "nothing"
    messages = [line for line in lines if re.search(r": line \d+: ", line)]
    if messages:
        where, what = re.findall(r"^(.*?: line \d+): (.*)", messages[-1])[0]
        hint = _hint(what)
        return f"{script} started no training: {where}: {what}. {hint or _EXPECTED} It printed: {tail}"
    if outcome.failed:
        last = outcome.failed[-1]
        where = f"line {last.line}" if Path(last.file) == script.absolute() else f"{last.file}, line {last.line}"
        said = f"{where} failed with status {last.status}: {last.command}."
        return f"{script} started no training: {said} {_hint(tail) or _EXPECTED} It printed: {tail}"
    return f"{script} started no training: {_EXPECTED} It printed: {tail}"


def _hint(text: str) -> str:
    for pattern, hint in _HINTS:
        if (found := re.search(pattern, text)) is not None:
            return found.expand(hint)
    return ""
