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
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_lancet.lab.launch.isolated import grammars, pbs, remote, slurm
from megatron_lancet.lab.launch.isolated.options import Grammar, Options, split

LAUNCHED_BY = "LANCET_LAUNCHED_BY"
"""Variable with the launchers of a process, outermost first: :class:`Launcher` as JSON."""
STAND_INS = "LANCET_STAND_INS"
"""Variable with the folder of the stand-ins."""

_ON_HOSTS = (
    *("PATH", "PYTHONPATH", "TMPDIR", "BASH_ENV", "LANCET_BASH_ENV", "LANCET_LAUNCH_RECORD"),
    *(STAND_INS, LAUNCHED_BY, slurm.FACTS),
)
"""Variables of the stand-ins, which the commands on other hosts need as well."""
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
        hosts: of its hostfile, with their slots; empty without one.
        missing: a file that it reads and that is not on this machine.
    """

    name: str
    tasks: int | None = None
    source: str = ""
    is_given: bool = True
    nodes: int | None = None
    nodes_from: str = ""
    hosts: Mapping[str, int] = field(default_factory=dict)
    missing: str = ""


def read_launchers(text: str) -> list[Launcher]:
    """Reads the text of :data:`LAUNCHED_BY`.

    Raises:
        ValueError, TypeError, AttributeError: the script has changed it.
    """
    found = [Launcher(**one) for one in json.loads(text or "[]")]
    for one in found:
        if not all(isinstance(number, int) for number in (one.tasks or 0, one.nodes or 0, *one.hosts.values())):
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


def _qsub(name: str, words: Sequence[str]) -> list[str]:
    """Starts a PBS job: its script, or the standard input."""
    options, rest = split(words, grammars.QSUB, _is_command)
    text = _text(Path(rest[0])) if rest else sys.stdin.read()
    job = pbs.job_of(text, {}, str(Path.cwd()), name, options)
    if job is not None:
        os.environ.pop(pbs.NODEFILE, None)
        os.environ.update({**job.variables, slurm.FACTS: slurm.written_facts(job.facts)})
        os.environ.update(pbs.node_file(os.environ, Path(os.environ["TMPDIR"])))
    _export(options.get("v", [""])[-1])
    return ["bash", *rest[:1]] if rest else ["bash", "-c", text, "pbs_script"]


def _pbsdsh(name: str, words: Sequence[str]) -> list[str]:
    """Runs a command on each host of the job; without ``-u`` on each of its slots."""
    options, rest = split(words, grammars.PBSDSH, _is_command)
    facts, hosts = slurm.read_facts(os.environ), pbs.hosts_of(os.environ)
    fact = facts.get(slurm.NODES if "u" in options else slurm.TASKS)
    tasks = len(hosts) if "u" in options else sum(hosts.values())
    source = f"{fact.source if fact else pbs.NODEFILE} x {name}"
    _note(Launcher(name, tasks or None, source, nodes=len(hosts) or None, nodes_from=source))
    return rest


def _ssh(_name: str, words: Sequence[str]) -> list[str]:
    return remote.ssh(words, _ON_HOSTS, Path(os.environ[STAND_INS]))


def _pdsh(_name: str, words: Sequence[str]) -> list[str]:
    return remote.pdsh(words, _ON_HOSTS, Path(os.environ[STAND_INS]))


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
    hosts = _hosts(options, ("hostfile", "machinefile", "f", "default-hostfile"))
    of_job = pbs.hosts_of(os.environ) if not hosts else {}
    named: dict[str, int] = {}
    for item in ",".join((*options.get("H", []), *options.get("host", []))).split(","):
        host, _, slots = item.partition(":")
        if host:
            named[host] = named.get(host, 0) + (slurm.leading(slots) or 1)
    found = next(((key, values[-1]) for key, values in options.items() if key in ("np", "n", "c")), None)
    of_node = next((values[-1] for key, values in options.items() if key in ("npernode", "ppn", "N", "ppr")), "")
    each = slurm.leading(of_node)
    tasks, source = (slurm.leading(found[1]), f"{name} -{found[0]} {found[1]}") if found else (None, "")
    if tasks is None and hosts:
        tasks, source = _on(hosts, each), f"{name}'s hostfile of {len(hosts)} hosts"
    elif tasks is None and named:
        tasks, source = _on(named, each), f"{name} with {len(named)} hosts"
    elif tasks is None and of_job:
        fact = slurm.read_facts(os.environ).get(slurm.NODES if each else slurm.TASKS)
        tasks = _on(of_job, each)
        source = slurm.joined(fact.source if fact else pbs.NODEFILE, f"{name} --ppn {each}" if each else name)
    _note(Launcher(name, tasks, source, nodes=tasks, nodes_from=source))
    _set(options.get("x", []))
    if tasks is not None:
        of_ranks = {"OMPI_COMM_WORLD_SIZE": tasks, "OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_LOCAL_RANK": 0}
        of_ranks |= {"OMPI_COMM_WORLD_LOCAL_SIZE": min(tasks, 8), "PMI_SIZE": tasks, "PMI_RANK": 0}
        os.environ.update({key: str(value) for key, value in of_ranks.items()})
    return rest[: rest.index(":")] if ":" in rest else rest


def _on(hosts: Mapping[str, int], each: int | None) -> int:
    """Returns the number of tasks on all hosts: ``each`` per host, or one per slot if that is None."""
    return len(hosts) * each if each else sum(hosts.values())


def _deepspeed(name: str, words: Sequence[str]) -> list[str]:
    options, _ = split(words, grammars.DEEPSPEED, _is_command)
    files = ("hostfile", "H")
    _note(Launcher(name, hosts=_hosts(options, files), missing=_missing(options, files)))
    return ["python", "-m", "deepspeed.launcher.runner", *words]


def _accelerate(name: str, words: Sequence[str]) -> list[str]:
    if list(words[:1]) != ["launch"]:
        return []
    options, _ = split(words[1:], grammars.ACCELERATE, _is_command)
    files = ("config_file", "config-file")
    lines = _lines([values[-1] for key, values in options.items() if key in files])
    settings = {key: value for line in lines for key, value in re.findall(r"^(num_\w+):\s*[\"']?(\d+)", line)}
    processes, machines = (slurm.leading(settings.get(key, "")) for key in ("num_processes", "num_machines"))
    source = f"num_processes: {processes} in accelerate's --config_file" if processes else ""
    _note(Launcher(name, processes, source, nodes=machines, missing=_missing(options, files)))
    return ["python", "-m", "accelerate.commands.launch", *words[1:]]


def _hosts(options: Options, names: Sequence[str]) -> dict[str, int]:
    """Returns the hosts of a launcher's hostfile, with their slots; nothing without one."""
    files = [values[-1] for name, values in options.items() if name in names]
    return {host: slots for file in files for host, slots in hosts_in(Path(file)).items()}


def hosts_in(file: Path) -> dict[str, int]:
    """Returns the hosts of a file, with their slots: lines ``host slots=8`` or ``host:8``, or a line for each slot."""
    hosts: dict[str, int] = {}
    for line in _lines([str(file)]):
        words = line.partition("#")[0].split()
        if words:
            slots = re.search(r"(?:slots=|:)(\d+)", line)
            host = words[0].partition(":")[0]
            hosts[host] = hosts.get(host, 0) + (int(slots[1]) if slots else 1)
    return hosts


def _missing(options: Options, names: Sequence[str]) -> str:
    """Returns the named file that is not on this machine; empty if there is none."""
    files = [values[-1] for name, values in options.items() if name in names]
    return next((file for file in files if not Path(file).is_file()), "")


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
    **{"accelerate": _accelerate, "qsub": _qsub, "pbsdsh": _pbsdsh, "ssh": _ssh, "pdsh": _pdsh},
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
