"""The number of ranks of a started program, and the source of this number."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.launch.deepspeed import ranks_of_deepspeed, whole_number
from megatron_lancet.lab.launch.isolated import pbs, slurm
from megatron_lancet.lab.launch.isolated.grammars import ACCELERATE, DEEPSPEED, TORCHRUN
from megatron_lancet.lab.launch.isolated.launchers import Launcher, hosts_in
from megatron_lancet.lab.launch.isolated.options import Options, split
from megatron_lancet.lab.launch.isolated.script import Started
from megatron_lancet.lab.launch.isolated.slurm import Fact, joined, leading
from megatron_lancet.lab.launch.isolated.stand_ins import (
    ACCELERATE_MODULES,
    DEEPSPEED_MODULES,
    LAUNCHER_FILES,
    TORCHRUN_MODULES,
)

_GRAMMARS = {"torchrun": TORCHRUN, "deepspeed": DEEPSPEED, "accelerate": ACCELERATE}
_SIZES = ("nnodes", "nproc-per-node", "num-nodes", "num-gpus", "num-machines", "num-processes")
_ALL_GPUS = ("gpu", "auto", "cuda")


@dataclass(frozen=True)
class Program:
    """A program in a launch.

    Attributes:
        launcher: torchrun, deepspeed, accelerate, or empty.
        options: of the launcher, by name with dashes.
        arguments: of the program.
    """

    launcher: str
    options: Mapping[str, str]
    arguments: list[str]


def program_of(words: Sequence[str]) -> Program | None:
    """Returns the training program in words behind Python's name; None without one."""
    for index, word in enumerate(words):
        is_module = index > 0 and words[index - 1] in ("-m", "--module")
        if (is_module and word in TORCHRUN_MODULES) or (not is_module and Path(word).name in LAUNCHER_FILES[:2]):
            return _launched("torchrun", words[index + 1 :])
        if (is_module and word in DEEPSPEED_MODULES) or (not is_module and Path(word).name == LAUNCHER_FILES[2]):
            return _launched("deepspeed", words[index + 1 :])
        if is_module and word in ACCELERATE_MODULES:
            return _launched("accelerate", words[index + 1 :])
        if is_module or word.endswith(".py"):
            return Program("", {}, list(words[index + 1 :]))
    return None


def _launched(launcher: str, words: Sequence[str]) -> Program | None:
    options, rest = split(words, _GRAMMARS[launcher], lambda _: False)
    if not rest:
        return None
    if {"no-python", "no_python"} & set(options):
        position = next((index for index, word in enumerate(rest) if word.endswith(".py")), 0)
        rest = rest[position:]
    return Program(launcher, _full_names(options), rest[1:])


def _full_names(options: Options) -> dict[str, str]:
    """Names with dashes; torchrun takes the start of a name too."""
    found = {}
    for name, values in options.items():
        dashed = name.replace("_", "-")
        full = [size for size in _SIZES if len(dashed) > 3 and size.startswith(dashed)]
        found[full[0] if len(full) == 1 else dashed] = values[-1]
    return found


def ranks_of(started: Started, program: Program, script: str) -> Fact | None:
    """Returns the number of ranks and its source; None if nothing sets it.

    Args:
        script: text of the launch script.

    Raises:
        UsageError: a size of the launcher is no number.
    """
    environment = started.environment
    step = next((one for one in reversed(started.launched_by) if one.tasks), None)
    if program.launcher == "torchrun":
        return _torchrun(program.options, environment, step, script)
    if program.launcher == "deepspeed":
        return ranks_of_deepspeed(program.options, _noted(started, program), _gpus(environment))
    if program.launcher == "accelerate":
        return _accelerate(program.options, _noted(started, program), environment)
    size = leading(environment.get("WORLD_SIZE", ""))
    if step is not None and step.tasks is not None and (step.is_given or size is None):
        other = f"; WORLD_SIZE={size} differs" if size not in (None, step.tasks) else ""
        return Fact(step.tasks, f"{step.source}{other}")
    if size is not None:
        return Fact(size, f"WORLD_SIZE={size}")
    tasks = slurm.read_facts(environment).get(slurm.TASKS)
    return tasks if tasks is not None and tasks.is_given else None


def _noted(started: Started, program: Program) -> Launcher:
    """Returns what the launcher's command noted; ``python -m`` notes nothing, so files that it names are read here."""
    noted = next((one for one in reversed(started.launched_by) if one.name == program.launcher), None)
    if noted is not None:
        return noted
    file = next((program.options[name] for name in ("hostfile", "H", "config-file") if name in program.options), "")
    hosts = hosts_in(Path(file)) if program.launcher == "deepspeed" and file else {}
    return Launcher(program.launcher, hosts=hosts, missing="" if hosts else file)


def _torchrun(options: Mapping[str, str], environment: Mapping[str, str], step: Launcher | None, script: str) -> Fact:
    text = options.get("nproc-per-node", environment.get("PET_NPROC_PER_NODE", "1"))
    of_node = (
        _gpus(environment)
        if text in _ALL_GPUS
        else Fact(whole_number("nproc-per-node", text), f"--nproc-per-node {text}")
    )
    source = of_node.source if text in _ALL_GPUS else ""
    own = f"torchrun --nproc-per-node {text}" + (f" ({source})" if source else "")
    asked = options.get("nnodes", environment.get("PET_NNODES"))
    if asked is None or "standalone" in options:
        if step is None or step.nodes is None or ("standalone" in options and step.nodes > 1):
            return Fact(of_node.value, own)
        return Fact(step.nodes * of_node.value, joined(step.nodes_from, own))
    num_nodes = whole_number("nnodes", asked.rpartition(":")[2])
    job = slurm.read_facts(environment).get(slurm.NODES)
    is_literal = re.search(rf"--nnodes[= ]\s*[\"']?{re.escape(asked)}\b", script) is not None
    if job is not None and job.value == num_nodes and not is_literal and _reads_nodes(script):
        return Fact(num_nodes * of_node.value, joined(job.source, own))
    return Fact(num_nodes * of_node.value, own.replace("torchrun", f"torchrun --nnodes {asked}", 1))


def _reads_nodes(script: str) -> bool:
    return any(name in script for name in (slurm.NODES, "SLURM_JOB_NUM_NODES", "NODELIST", *pbs.READS_NODES))


def _accelerate(options: Mapping[str, str], own: Launcher, environment: Mapping[str, str]) -> Fact:
    """Reads the number of processes on all machines, from the command line or from its file of settings."""
    filters = [name for name in ("deepspeed-inclusion-filter", "deepspeed-exclusion-filter") if options.get(name)]
    if filters:
        raise UsageError(f"accelerate launch --{filters[0].replace('-', '_')} is not read. Pass --num_processes alone.")
    asked = options.get("num-machines")
    machines = whole_number("num_machines", asked) if asked is not None else own.nodes or 1
    if "num-processes" in options:
        text = options["num-processes"]
        found = Fact(whole_number("num_processes", text), f"accelerate launch --num_processes {text}")
    elif own.missing:
        raise UsageError(f"accelerate's --config_file {own.missing} is not on this machine. Pass --num_processes.")
    elif own.tasks is not None:
        found = Fact(own.tasks, own.source)
    elif machines > 1:
        raise UsageError(
            f"accelerate launch --num_machines {machines} does not say how many processes all machines start. Pass "
            "--num_processes."
        )
    else:
        gpus = _gpus(environment)
        found = Fact(gpus.value, f"accelerate launch ({gpus.source})")
    if found.value % machines:
        raise UsageError(
            f"{found.source}: {found.value} processes can't be shared evenly by {machines} machines. Pass a multiple "
            "of --num_machines."
        )
    return found


def _gpus(environment: Mapping[str, str]) -> Fact:
    """Returns the GPUs of a node."""
    return slurm.read_facts(environment).get(slurm.GPUS, Fact(8, "8 GPUs a node assumed"))
