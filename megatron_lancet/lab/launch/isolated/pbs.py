"""What PBS sets for a job: its node file, variables, numbers of nodes and slots, and the source of each number."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.launch.isolated import slurm
from megatron_lancet.lab.launch.isolated.grammars import QSUB
from megatron_lancet.lab.launch.isolated.options import Options, split
from megatron_lancet.lab.launch.isolated.slurm import Fact

NODEFILE = "PBS_NODEFILE"
HOSTS = "LANCET_PBS_HOSTS"
"""Variable with the text of the job's node file, which is written where the script can read it."""
READS_NODES = (NODEFILE, "PBS_NUM_NODES")
"""Variables from which a script learns its nodes."""

_ON_HOSTS = ("scatter", "vscatter")
"""Words of ``-l place`` that put each chunk on a host of its own."""


@dataclass(frozen=True)
class Job:
    """A job of PBS.

    Attributes:
        slots: lines of the node file, for each node.
        facts: sources of the numbers, under SLURM's names: other stand-ins read them there.
        variables: of the job, without the node file.
    """

    slots: list[int]
    facts: dict[str, Fact]
    variables: dict[str, str]


def job_of(
    text: str, environment: Mapping[str, str], folder: str, command: str = "", options: Options | None = None
) -> Job | None:
    """Returns the job of a script. The environment comes first, then the command's options, then ``#PBS`` lines.

    Returns:
        None if the script is not written for PBS.

    Raises:
        UsageError: the nodes that it asks for can't be read.
    """
    of_script, _ = split(slurm.directives(text, "#PBS"), QSUB, lambda _: False)
    all_options = {**of_script, **(options or {})}
    owner = command if options and "l" in options else "#PBS"
    hosts = hosts_of(environment)
    if hosts:
        slots, gpus = list(hosts.values()), None
        nodes = Fact(len(slots), f"{NODEFILE} of {len(slots)} hosts")
    elif not of_script and not options:
        if not re.search(r"\$\{?PBS_", text) or slurm.has_own_default(text, NODEFILE):
            return None
        slots, gpus = [1], None
        nodes = Fact(1, f"{NODEFILE} is not set: 1 node assumed", is_given=False)
    else:
        slots, gpus, nodes = _asked(all_options.get("l", []), owner)
    facts = {
        slurm.NODES: nodes,
        slurm.TASKS: Fact(sum(slots), nodes.source, is_given=False),  # of mpirun; a script itself runs once
        slurm.GPUS: gpus or Fact(8, "8 GPUs a node assumed", is_given=False),
    }
    return Job(slots, facts, _variables(slots, all_options, folder))


def _asked(lists: Sequence[str], owner: str) -> tuple[list[int], Fact | None, Fact]:
    """Returns the slots of each node, its GPUs, and the number of nodes, as ``-l`` options ask for them."""
    resources = [item for text in lists for item in text.split(",")]
    text = next((item for item in resources if re.match(r"(select|nodes)=", item)), "")
    if not text:
        return [1], None, Fact(1, f"{owner} without select or nodes: 1 node assumed", is_given=False)
    slots, gpus = [], set()
    for chunk in text.partition("=")[2].split("+"):
        count, *parts = chunk.split(":")
        if not count or "=" in count:
            count, parts = "1", chunk.split(":")
        named = dict(part.split("=", 1) for part in parts if "=" in part)
        numbers = {name: slurm.leading(value) for name, value in named.items()}
        of_chunk = next((numbers[name] for name in ("mpiprocs", "ppn") if name in named), 1)
        number = int(count) if count.isdecimal() else 1  # the name of a host
        if number < 1 or of_chunk is None:
            raise UsageError(f"{owner} -l {text}: expected whole numbers of nodes and processes, found {chunk!r}.")
        slots += [of_chunk] * number
        gpus.add(next((numbers[name] for name in ("ngpus", "gpus") if name in named), None))
    place = next((item.partition("=")[2] for item in resources if item.startswith("place=")), "")
    is_spread = text.startswith("nodes=") or len(slots) == 1 or not {*place.split(":")}.isdisjoint(_ON_HOSTS)
    source = f"{owner} -l {text}" + ("" if is_spread else ", a host for each chunk assumed")
    of_node = gpus.pop() if len(gpus) == 1 else None
    return slots, None if of_node is None else Fact(of_node, source), Fact(len(slots), source)


def _variables(slots: Sequence[int], options: Options, folder: str) -> dict[str, str]:
    hosts = ["localhost"] if len(slots) == 1 else [f"node{number}" for number in range(1, len(slots) + 1)]
    lines = [host for host, count in zip(hosts, slots, strict=True) for _ in range(count)]
    return {
        **{HOSTS: "".join(f"{line}\n" for line in lines), "PBS_O_WORKDIR": folder, "PBS_JOBID": "1.server"},
        **{"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBNAME": options.get("N", ["train"])[-1], "PBS_O_HOST": "localhost"},
        **{"PBS_QUEUE": options.get("q", ["batch"])[-1], "PBS_NODENUM": "0", "PBS_TASKNUM": "1"},
        **{"PBS_NUM_NODES": str(len(slots)), "PBS_NUM_PPN": str(slots[0]), "PBS_NP": str(sum(slots))},
    }


def node_file(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Writes the node file of a job into a folder and returns its variable; nothing without such a job."""
    if HOSTS not in environment or NODEFILE in environment:
        return {}
    file = folder / "nodefile"
    file.write_text(environment[HOSTS])
    return {NODEFILE: str(file)}


def hosts_of(environment: Mapping[str, str]) -> dict[str, int]:
    """Returns the hosts of a job's node file, with their slots; nothing without one."""
    file = Path(environment.get(NODEFILE, ""))
    return dict(Counter(file.read_text(errors="replace").split())) if file.is_file() else {}
