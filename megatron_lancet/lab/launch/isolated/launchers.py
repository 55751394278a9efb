"""Stand-ins for launchers, containers and SLURM's commands: they run the command behind their options, on one rank.

``python -c "... main()" srun -N 8 bash -c ...``, inside the isolation. What they would start is noted in the
environment of the command.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_lancet.lab.launch.isolated import grammars, slurm
from megatron_lancet.lab.launch.isolated.options import Grammar, Options, split

LAUNCHED_BY = "LANCET_LAUNCHED_BY"
"""Variable with the launchers of a process, outermost first: :class:`Launcher` as JSON."""
STAND_INS = "LANCET_STAND_INS"
"""Variable with the folder of the stand-ins."""

_SHELLS = ("bash", "sh")
_NO_COMMANDS = ("true", "false", "yes", "no", "none", "all", "test", "user")
"""Words that are commands, and more often values of options."""
_RUN_OF = ("conda", "mamba", "micromamba", "uv", "poetry", "pipenv", "pixi")
"""Commands that run the command behind ``run``."""


@dataclass(frozen=True)
class Launcher:
    """A launcher or a container of a process.

    Attributes:
        tasks: processes that it starts; None if it does not say.
        source: for the user: who sets the tasks.
        is_given: whether somebody sets the tasks, or they are its default.
        nodes: on which it starts them.
        nodes_from: for the user: who sets the nodes.
        hosts: of its hostfile; 0 without one.
        slots: of all these hosts.
    """

    name: str
    tasks: int | None = None
    source: str = ""
    is_given: bool = True
    nodes: int | None = None
    nodes_from: str = ""
    hosts: int = 0
    slots: int = 0


def read_launchers(text: str) -> list[Launcher]:
    """Reads the text of :data:`LAUNCHED_BY`.

    Raises:
        ValueError, TypeError: the script has changed it.
    """
    found = [Launcher(**one) for one in json.loads(text or "[]")]
    for one in found:
        if not all(isinstance(number, int) for number in (one.tasks or 0, one.nodes or 0, one.hosts, one.slots)):
            raise ValueError(f"no numbers in {text}")
    return found


def main() -> None:
    """Runs the command behind the options of a launcher, in place of this process."""
    name, words = sys.argv[1], sys.argv[2:]
    starts = _STARTS.get(name, _prefix)
    command = starts(name, words)
    if command:
        _replace_by(command)


def _srun(name: str, words: Sequence[str]) -> list[str]:
    options, rest = slurm.options_of(words)
    step = slurm.step_of(options, os.environ)
    nodes, tasks = step.nodes, step.tasks
    _note(Launcher(name, tasks.value, tasks.source, tasks.is_given, nodes.value, nodes.source))
    of_step = {"SLURM_NNODES": nodes.value, "SLURM_STEP_NUM_NODES": nodes.value}
    of_step |= dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), tasks.value)
    gpus = slurm.gpus_of(options)
    if gpus is not None:
        of_step[slurm.GPUS] = gpus.value
        os.environ[slurm.FACTS] = slurm.written_facts({**slurm.read_facts(os.environ), slurm.GPUS: gpus})
    os.environ.update({key: str(value) for key, value in of_step.items()})
    _export(options.get("export", ""))
    return _on_host(rest, [item.split(":")[:2] for item in options.get("container-mounts", "").split(",")])


def _sbatch(name: str, words: Sequence[str]) -> list[str]:
    """Starts a job: its script, ``--wrap`` or the standard input, with the job's variables; salloc has a command."""
    options, rest = slurm.options_of(words)
    if name == "salloc":
        text, command = "", rest
    elif rest:
        text, command = _text(Path(rest[0])), ["bash", *rest]
    elif "wrap" in options:
        text, command = "", ["bash", "-c", options["wrap"]]
    else:
        text = sys.stdin.read()
        command = ["bash", "-c", text, "slurm_script"]
    known = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    job = slurm.job_of(text, known, str(Path.cwd()), name, options)
    os.environ.update({**job.assumed_in(text), **job.given, slurm.FACTS: slurm.written_facts(job.facts)})
    _export(options.get("export", ""))
    return command


def _export(names: str) -> None:
    """Sets the variables of ``--export ALL,NAME=VALUE``."""
    _set(names.split(","))


def _set(settings: Sequence[str]) -> None:
    for setting in settings:
        name, equals, value = setting.partition("=")
        if equals and name.isidentifier():
            os.environ[name] = value


def _docker(name: str, words: Sequence[str]) -> list[str]:
    _, rest = split(words, Grammar(frozenset({"debug", "tls"}), "D"), _is_command)
    rest = rest[1:] if rest[:1] == ["container"] else rest
    if rest[:1] not in (["run"], ["exec"]):
        return []
    options, behind = split(rest[1:], grammars.DOCKER, _is_command)
    command = [*options.get("entrypoint", [""])[-1].split(), *behind[1:]]
    _note(Launcher(name))
    _set([*options.get("e", []), *options.get("env", []), *_lines(options.get("env-file", []))])
    mounts = [item.split(":")[:2] for item in (*options.get("v", []), *options.get("volume", []))]
    for item in options.get("mount", []):
        parts = dict(part.split("=", 1) for part in item.split(",") if "=" in part)
        source, target = (next((parts[key] for key in keys if key in parts), "") for keys in _SIDES)
        mounts.append([source, target])
    return _on_host(command, mounts)


_SIDES = ("source", "src"), ("target", "destination", "dst")


def _singularity(name: str, words: Sequence[str]) -> list[str]:
    _, rest = split(words, grammars.SINGULARITY, _is_command)
    if rest[:1] not in (["exec"], ["run"]):
        return []
    options, behind = split(rest[1:], grammars.SINGULARITY, _is_command)
    _note(Launcher(name))
    _set([part for item in options.get("env", []) for part in item.split(",")] + _lines(options.get("env-file", [])))
    binds = [part for item in (*options.get("B", []), *options.get("bind", [])) for part in item.split(",")]
    return _on_host(behind[1:], [bind.split(":")[:2] for bind in binds])


def _enroot(name: str, words: Sequence[str]) -> list[str]:
    if list(words[:1]) not in (["start"], ["exec"]):
        return []
    options, behind = split(words[1:], grammars.ENROOT, _is_command)
    _note(Launcher(name))
    _set([*options.get("e", []), *options.get("env", [])])
    return _on_host(behind[1:], [item.split(":")[:2] for item in (*options.get("m", []), *options.get("mount", []))])


def _mpirun(name: str, words: Sequence[str]) -> list[str]:
    options, rest = split(words, grammars.MPI, _is_command)
    hosts, slots = _hosts(options, ("hostfile", "machinefile", "f", "default-hostfile"))
    named = ",".join((*options.get("H", []), *options.get("host", []))).split(",")
    named = [item for item in named if item]
    found = next(((key, values[-1]) for key, values in options.items() if key in ("np", "n", "c")), None)
    of_node = next((values[-1] for key, values in options.items() if key in ("npernode", "ppn", "N", "ppr")), "")
    tasks, source = (slurm.leading(found[1]), f"{name} -{found[0]} {found[1]}") if found else (None, "")
    if tasks is None and hosts:
        each = slurm.leading(of_node)
        tasks, source = (hosts * each if each else slots), f"{name}'s hostfile of {hosts} hosts"
    elif tasks is None and named:
        tasks = sum(slurm.leading(item.partition(":")[2]) or 1 for item in named)
        source = f"{name} with {len(named)} hosts"
    _note(Launcher(name, tasks, source, nodes=tasks, nodes_from=source))
    _set(options.get("x", []))
    if tasks is not None:
        of_ranks = {"OMPI_COMM_WORLD_SIZE": tasks, "OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_LOCAL_RANK": 0}
        of_ranks |= {"OMPI_COMM_WORLD_LOCAL_SIZE": min(tasks, 8), "PMI_SIZE": tasks, "PMI_RANK": 0}
        os.environ.update({key: str(value) for key, value in of_ranks.items()})
    return rest[: rest.index(":")] if ":" in rest else rest


def _deepspeed(name: str, words: Sequence[str]) -> list[str]:
    options, _ = split(words, grammars.DEEPSPEED, _is_command)
    hosts, slots = _hosts(options, ("hostfile", "H"))
    _note(Launcher(name, hosts=hosts, slots=slots))
    return ["python", "-m", "deepspeed.launcher.runner", *words]


def _hosts(options: Options, names: Sequence[str]) -> tuple[int, int]:
    """Returns the hosts and slots of a hostfile; zeros without one."""
    files = [values[-1] for name, values in options.items() if name in names]
    lines = [line.partition("#")[0].strip() for line in _lines(files)]
    slots = [re.search(r"(?:slots=|:)(\d+)", line) for line in lines if line]
    return len(slots), sum(int(found[1]) if found else 1 for found in slots)


def _prefix(name: str, words: Sequence[str]) -> list[str]:
    """Runs the command behind a prefix such as numactl; ``conda`` and the like need ``run``."""
    if name in _RUN_OF:
        position = list(words).index("run") if "run" in words else -1
        if position < 0:
            return []
        words = words[position + 1 :]
    elif name in ("nsys", "ncu") and list(words[:1]) in (["profile"], ["launch"]):
        words = words[1:]
    _, rest = split(words, grammars.GUESSED, _is_command)
    while rest and not _is_command(rest[0]) and len(rest) > 1:  # operands, as taskset's mask
        rest = rest[1:]
    return rest


def _scontrol(_name: str, words: Sequence[str]) -> list[str]:
    """Prints the hosts of ``scontrol show hostnames LIST``; the job's without a list."""
    hosts = words[2] if len(words) > 2 else os.environ.get("SLURM_JOB_NODELIST", "localhost")
    for item in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", hosts):
        start, _, ranges = item.partition("[")
        for part in ranges.rstrip("]").split(",") if ranges else [""]:
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first.isdecimal() else [""]
            for number in numbers:
                sys.stdout.write(f"{start}{str(number).zfill(len(first))}\n")
    return []


_STARTS: Mapping[str, Callable[[str, Sequence[str]], list[str]]] = {
    **{"srun": _srun, "sbatch": _sbatch, "salloc": _sbatch, "scontrol": _scontrol, "deepspeed": _deepspeed},
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "prterun"), _mpirun),
    **dict.fromkeys(("docker", "podman", "nvidia-docker", "nerdctl"), _docker),
    **dict.fromkeys(("singularity", "apptainer"), _singularity),
    "enroot": _enroot,
}
PREFIXES = ("sudo", "numactl", "nohup", "nsys", "ncu", "taskset", "stdbuf", "py-spy", "shifter", *_RUN_OF)
"""Commands that run the command after their options and are not launchers."""
NAMES = (*_STARTS, *PREFIXES)


def _note(launcher: Launcher) -> None:
    """Notes a launcher for the record of its command."""
    outer = read_launchers(os.environ.get(LAUNCHED_BY, ""))
    os.environ[LAUNCHED_BY] = json.dumps([asdict(one) for one in (*outer, launcher)])


def _lines(files: Sequence[str]) -> list[str]:
    return [line.strip() for file in files for line in _text(Path(file)).splitlines()]


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(errors="replace")
    return ""


def _stand_in(word: str) -> Path | None:
    """Returns the stand-in for a command, also for a path that is not on this machine."""
    name = "python" if re.fullmatch(r"python[0-9.]*", Path(word).name) else Path(word).name
    file = Path(os.environ.get(STAND_INS, "/nonexistent")) / name
    return file if name and file.is_file() else None


def _is_command(word: str) -> bool:
    if word in _NO_COMMANDS or word.isdecimal():
        return False
    return _stand_in(word) is not None or word.endswith((".py", ".sh")) or shutil.which(word) is not None


def _on_host(command: Sequence[str], mounts: Sequence[Sequence[str]]) -> list[str]:
    """Replaces a container's path of the command, or of the script that it runs, by the path on this machine."""
    command = list(command)
    position = 0
    if command and _stand_in(command[0]) is not None:
        position = next((index for index, word in enumerate(command) if index and not word.startswith("-")), 0)
    if not command or "-c" in command[:position] or Path(command[position]).exists():
        return command
    for source, target in (mount for mount in mounts if len(mount) == 2):
        path = Path(command[position])
        if target.startswith("/") and path.is_relative_to(target):
            command[position] = str(Path(source) / path.relative_to(target))
    return command


def _replace_by(command: Sequence[str]) -> None:
    """Replaces this process by a command, or by its stand-in."""
    first, folder = command[0], Path(os.environ[STAND_INS])
    stand_in = _stand_in(first)
    words = [str(stand_in or first), *command[1:]]
    if stand_in is None and first.endswith(".py"):
        words = [str(folder / "python"), *command]
    elif stand_in is None and (first.endswith(".sh") or first.startswith("-")):
        words = [str(folder / "bash"), *command]
    sys.stdout.flush()
    try:
        os.execvp(words[0], words)  # noqa: S606 what the script starts, isolated as the script is
    except OSError as error:
        sys.stderr.write(f"{first}: {error.strerror}\n")
        sys.exit(127)
