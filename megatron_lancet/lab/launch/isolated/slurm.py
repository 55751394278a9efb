"""What SLURM sets for a job and for a step: variables, numbers of nodes and tasks, and the source of each number."""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from megatron_lancet.lab.launch.isolated.grammars import SLURM
from megatron_lancet.lab.launch.isolated.options import Options, split

FACTS = "LANCET_SLURM"
"""Variable with the sources of SLURM's numbers, as JSON."""
NODES, TASKS, TASKS_OF_A_NODE, GPUS = "SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE"

_LONG = {
    **{"N": "nodes", "n": "ntasks", "J": "job-name", "c": "cpus-per-task", "p": "partition", "A": "account"},
    **{"G": "gpus", "a": "array", "tasks-per-node": "ntasks-per-node"},
}
_ASSUMED = {
    **{"SLURM_JOB_ID": "1", "SLURM_JOBID": "1", "SLURM_JOB_USER": "user", "SLURM_JOB_UID": "0", "SLURM_STEP_ID": "0"},
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_RESTART_COUNT": "0"},
    **{"SLURM_CLUSTER_NAME": "cluster", "SLURM_SUBMIT_HOST": "localhost", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"},
    **{"SLURM_JOB_PARTITION": "batch", "SLURM_JOB_ACCOUNT": "account", "SLURM_MEM_PER_NODE": "1000000"},
}


@dataclass(frozen=True)
class Fact:
    """A number of SLURM.

    Attributes:
        source: for the user: who sets it.
        is_given: whether somebody sets it, or it is SLURM's default.
    """

    value: int
    source: str
    is_given: bool = True


@dataclass(frozen=True)
class Job:
    """Variables of a job.

    Attributes:
        given: that follow from options or the environment.
        assumed: others that scripts read.
        facts: sources of the numbers.
    """

    given: dict[str, str]
    assumed: dict[str, str]
    facts: dict[str, Fact]

    def assumed_in(self, script: str) -> dict[str, str]:
        """Returns the assumed variables, without those for which a script's text has a value or a test of its own."""
        return {name: value for name, value in self.assumed.items() if not has_own_default(script, name)}


@dataclass(frozen=True)
class Step:
    """What one srun starts."""

    nodes: Fact
    tasks: Fact


def directives(text: str, mark: str = "#SBATCH") -> list[str]:
    """Returns the words of the lines with a mark in front of a script's first command."""
    words: list[str] = []
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if re.match(rf"{mark}\s", line):
            with suppress(ValueError):  # sbatch and qsub would refuse the script; bash runs it
                words += shlex.split(line[len(mark) :], comments=True)
    return words


def has_own_default(script: str, name: str) -> bool:
    """Returns whether a script handles that a variable is not set, as in ``${NAME:-1}`` or ``[ -z "$NAME" ]``."""
    return re.search(rf"\$\{{{name}(?::?[-=+])|-[nzv] \"?\$?\{{?{name}\b", script) is not None


def options_of(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Splits words of srun, sbatch or salloc into options, by their long names, and the rest."""
    found, rest = split(words, SLURM, lambda _: False)
    return long_names(found), rest


def long_names(found: Options) -> dict[str, str]:
    """Returns the last value of each option, by its long name."""
    return {_LONG.get(name, name): values[-1] for name, values in found.items()}


def job_of(
    script: str,
    environment: Mapping[str, str],
    folder: str,
    command: str = "",
    options: Mapping[str, str] | None = None,
) -> Job:
    """Returns the variables of a job. The environment comes first, then the command's options, then ``#SBATCH`` lines.

    Args:
        script: text with ``#SBATCH`` lines.
        folder: the submission's folder.
        command: name of the command that submits the script, if it has options.
        options: of this command.
    """
    of_command = options or {}
    all_options = {**options_of(directives(script))[0], **of_command}

    def owner(option: str) -> str:
        return command if option in of_command else "#SBATCH"

    def number(names: Sequence[str], option: str) -> Fact | None:
        for name in names:
            if (value := leading(environment.get(name, ""))) is not None:
                return Fact(value, f"{name}={value}")
        value = _last_number(all_options.get(option, ""))
        return None if value is None else Fact(value, f"{owner(option)} --{option}={value}")

    of_node = number([TASKS_OF_A_NODE], "ntasks-per-node")
    tasks, nodes = number([TASKS, "SLURM_NPROCS"], "ntasks"), number([NODES, "SLURM_JOB_NUM_NODES"], "nodes")
    gpus = number([GPUS], "gpus-per-node") or _gpus(all_options.get("gres", ""), owner("gres"))
    of_gpu, all_gpus = number([], "ntasks-per-gpu"), number(["SLURM_GPUS"], "gpus")
    if of_node is None and of_gpu is not None and gpus is not None:
        of_node = Fact(gpus.value * of_gpu.value, joined(gpus.source, of_gpu.source))
    if nodes is None and of_node is not None and tasks is not None:
        nodes = Fact(math.ceil(tasks.value / of_node.value), joined(tasks.source, of_node.source))
    if nodes is None and gpus is not None and all_gpus is not None:
        nodes = Fact(math.ceil(all_gpus.value / gpus.value), joined(all_gpus.source, gpus.source))
    if nodes is None:
        nodes = Fact(1, f"{NODES} is not set: 1 node assumed", is_given=False)
    if tasks is None and of_node is not None:
        tasks = Fact(nodes.value * of_node.value, joined(nodes.source, of_node.source))
    if gpus is None and all_gpus is not None:
        gpus = Fact(max(1, all_gpus.value // nodes.value), all_gpus.source)
    tasks = tasks or Fact(nodes.value, f"{nodes.source}, one task a node", is_given=False)
    of_node = of_node or Fact(math.ceil(tasks.value / nodes.value), "", is_given=False)
    gpus = gpus or Fact(8, "8 GPUs a node assumed", is_given=False)
    facts = {NODES: nodes, TASKS: tasks, TASKS_OF_A_NODE: of_node, GPUS: gpus}
    given, assumed = _variables(facts, all_options, folder)
    return Job(given, assumed, facts)


def _variables(
    facts: Mapping[str, Fact], options: Mapping[str, str], folder: str
) -> tuple[dict[str, str], dict[str, str]]:
    nodes, tasks, of_node, gpus = (facts[name] for name in (NODES, TASKS, TASKS_OF_A_NODE, GPUS))
    hosts = "localhost" if nodes.value == 1 else f"node[1-{nodes.value}]"
    all_tasks = f"{of_node.value}(x{nodes.value})" if nodes.value > 1 else str(of_node.value)
    given: dict[str, str] = {}
    assumed = {**_ASSUMED, "SLURM_SUBMIT_DIR": folder, "SLURM_JOB_NAME": "train", "SLURM_CPUS_PER_TASK": "1"}
    for fact, names in (
        (nodes, (NODES, "SLURM_JOB_NUM_NODES")),
        (tasks, (TASKS, "SLURM_NPROCS")),
        (of_node, (TASKS_OF_A_NODE,)),
        (gpus, (GPUS, "SLURM_GPUS_PER_NODE")),
    ):
        (given if fact.is_given else assumed).update(dict.fromkeys(names, str(fact.value)))
    of_nodes = {"SLURM_JOB_NODELIST": hosts, "SLURM_NODELIST": hosts, "SLURM_TASKS_PER_NODE": all_tasks}
    of_nodes |= {"SLURMD_NODENAME": hosts.replace("[", "").partition("-")[0], "SLURM_CPUS_ON_NODE": "1"}
    (given if nodes.is_given else assumed).update(of_nodes)
    named = {"job-name": "SLURM_JOB_NAME", "cpus-per-task": "SLURM_CPUS_PER_TASK", "partition": "SLURM_JOB_PARTITION"}
    given |= {name: options[option] for option, name in named.items() if options.get(option)}
    if options.get("account"):
        given["SLURM_JOB_ACCOUNT"] = options["account"]
    if options.get("array"):
        given |= {"SLURM_ARRAY_TASK_ID": str(leading(options["array"]) or 0), "SLURM_ARRAY_JOB_ID": "1"}
    return given, {name: value for name, value in assumed.items() if name not in given}


def step_of(options: Mapping[str, str], environment: Mapping[str, str]) -> Step:
    """Returns the nodes and tasks of an srun with these options, in a job's environment."""
    facts = read_facts(environment)
    gpus, of_gpu = gpus_of(options) or facts.get(GPUS), _last_number(options.get("ntasks-per-gpu", ""))
    job_nodes, job_tasks, of_node = (_fact(name, environment, facts) for name in (NODES, TASKS, TASKS_OF_A_NODE))
    nodes = job_nodes or Fact(1, f"{NODES} is not set: 1 node assumed", is_given=False)
    own_nodes, own_tasks = _last_number(options.get("nodes", "")), _last_number(options.get("ntasks", ""))
    own_of_node = _last_number(options.get("ntasks-per-node", ""))
    if own_nodes is not None:
        nodes = Fact(own_nodes, f"srun --nodes {own_nodes}")
    if own_tasks is not None:
        if own_nodes is None and own_of_node:
            nodes = Fact(math.ceil(own_tasks / own_of_node), f"srun --ntasks {own_tasks}")
        return Step(nodes, Fact(own_tasks, f"srun --ntasks {own_tasks}"))
    if own_of_node is not None:
        of_node = Fact(own_of_node, f"srun --ntasks-per-node {own_of_node}")
    elif of_gpu is not None and gpus is not None:
        own_of_node = gpus.value * of_gpu
        of_node = Fact(own_of_node, joined(gpus.source, f"srun --ntasks-per-gpu {of_gpu}"))
    is_whole = job_nodes is None or nodes.value == job_nodes.value
    if job_tasks is not None and job_tasks.is_given and own_of_node is None and is_whole:
        return Step(nodes, job_tasks)
    if of_node is not None and of_node.is_given:
        return Step(nodes, Fact(nodes.value * of_node.value, joined(nodes.source, of_node.source)))
    return Step(nodes, Fact(nodes.value, f"{nodes.source}, one task a node", is_given=False))


def gpus_of(options: Mapping[str, str]) -> Fact | None:
    """Returns the GPUs of a node in options of srun."""
    value = _last_number(options.get("gpus-per-node", ""))
    if value is not None:
        return Fact(value, f"srun --gpus-per-node {value}")
    return _gpus(options.get("gres", ""), "srun")


def joined(first: str, second: str) -> str:
    """Joins two sources, whose numbers are multiplied."""
    owner, _, option = second.partition(" ")
    if option.startswith("--") and first.startswith(f"{owner} --"):
        return f"{first} {option}"
    return f"{first} x {second}"


def written_facts(facts: Mapping[str, Fact]) -> str:
    """Returns facts as the text of the variable :data:`FACTS`."""
    return json.dumps({name: asdict(fact) for name, fact in facts.items()})


def read_facts(environment: Mapping[str, str]) -> dict[str, Fact]:
    """Returns the facts of an environment; none if the script has changed the variable."""
    try:
        facts = {str(name): Fact(**fact) for name, fact in json.loads(environment.get(FACTS, "{}")).items()}
    except (ValueError, TypeError, AttributeError):
        return {}
    return facts if all(isinstance(fact.value, int) and fact.value > 0 for fact in facts.values()) else {}


def _fact(name: str, environment: Mapping[str, str], facts: Mapping[str, Fact]) -> Fact | None:
    """Returns a variable's number and its source, also if the script has changed it."""
    value, fact = leading(environment.get(name, "")), facts.get(name)
    if value is None or (fact is not None and fact.value == value):
        return fact
    return Fact(value, f"{name}={value}")


def leading(text: str) -> int | None:
    """Returns the number at the start of a text, if it is at least 1."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found and int(found[0]) > 0 else None


def _last_number(text: str) -> int | None:
    """Returns the last number of ``8``, ``4-8`` or ``h100:8``, if it is at least 1."""
    numbers = re.findall(r"(?<![A-Za-z0-9])\d+", text)
    return int(numbers[-1]) if numbers and int(numbers[-1]) > 0 else None


def _gpus(gres: str, by: str) -> Fact | None:
    """Returns the GPUs of ``gpu:8`` or ``gpu:h100:8(S:0-1),nvme:1``."""
    for item in gres.split(","):
        name, _, rest = item.partition("(")[0].partition(":")
        if name == "gpu":
            return Fact(_last_number(rest) or 1, f"{by} --gres={item}")
    return None
