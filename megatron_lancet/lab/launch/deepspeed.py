"""The number of ranks that deepspeed starts: its hosts and slots, and the options that choose among them."""

import re
from collections.abc import Mapping

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.launch.isolated.launchers import Launcher
from megatron_lancet.lab.launch.isolated.slurm import Fact, leading

_CHOICES = ("include", "exclude")
_COUNTS = ("num-nodes", "num-gpus")
_REMEDY = "Put the file there, or pass Megatron's flags with WORLD_SIZE=N."


def ranks_of_deepspeed(options: Mapping[str, str], launcher: Launcher, gpus: Fact) -> Fact:
    """Returns the number of ranks and its source.

    Args:
        options: of deepspeed, by names with dashes.
        launcher: with the hosts of its hostfile.
        gpus: of a node without a hostfile.

    Raises:
        UsageError: deepspeed would refuse the options, or they need a hostfile that is not on this machine.
    """
    said = [f"--{name.replace('-', '_')} {options[name]}" for name in (*_COUNTS, *_CHOICES) if options.get(name)]
    chosen = [name for name in _CHOICES if options.get(name)]
    if len(said) > 1 and chosen:
        raise UsageError(
            f"deepspeed takes --include alone or --exclude alone, found {' '.join(said)}. Drop the others."
        )
    source = " ".join(["deepspeed", *said])
    hosts = dict(launcher.hosts)
    if chosen == ["include"]:
        return _included(options["include"], hosts, launcher, gpus, source)
    if launcher.missing and not {*_COUNTS} <= {*options}:
        raise UsageError(f"deepspeed's hostfile {launcher.missing} is not on this machine. {_REMEDY}")
    if chosen:
        return _excluded(options["exclude"], hosts or {"localhost": gpus.value}, source)
    if hosts and not said:
        return Fact(sum(hosts.values()), f"deepspeed with a hostfile of {len(hosts)} hosts")
    nodes = _count("num-nodes", options)
    of_node = _count("num-gpus", options)
    if hosts and not launcher.missing:
        slots = list(hosts.values())[:nodes]
        if nodes is not None and nodes > len(slots):
            raise UsageError(
                f"deepspeed --num_nodes {nodes}: the hostfile has {len(slots)} hosts. Add the others to it."
            )
        return Fact(len(slots) * of_node if of_node else sum(slots), f"{source} with a hostfile of {len(hosts)} hosts")
    notes = "" if of_node else f" ({gpus.source})"
    return Fact((nodes or 1) * (of_node or gpus.value), source + notes)


def _included(text: str, hosts: Mapping[str, int], launcher: Launcher, gpus: Fact, source: str) -> Fact:
    """Counts the chosen slots; a host without a list of slots has its hostfile's."""
    count, notes = 0, ""
    for host, slots in _chosen(text).items():
        if hosts and host not in hosts:
            raise UsageError(f"deepspeed --include {text}: the hostfile has no host {host}: it has {', '.join(hosts)}.")
        if slots:
            _check_slots(text, host, slots, hosts)
            count += len(slots)
        elif hosts:
            count += hosts[host]
        elif launcher.missing:
            raise UsageError(
                f"deepspeed --include {text} takes the slots of {host} from the hostfile {launcher.missing}, which is "
                f"not on this machine. {_REMEDY}"
            )
        else:
            count += gpus.value
            notes = f" ({gpus.source})"
    return Fact(count, source + notes)


def _excluded(text: str, hosts: dict[str, int], source: str) -> Fact:
    """Counts the slots that are left."""
    for host, slots in _chosen(text).items():
        if host not in hosts:
            raise UsageError(f"deepspeed --exclude {text}: the hostfile has no host {host}: it has {', '.join(hosts)}.")
        _check_slots(text, host, slots, hosts)
        hosts[host] -= len(slots) or hosts[host]
    left = sum(hosts.values())
    if left == 0:
        raise UsageError(f"deepspeed --exclude {text} leaves no slot of {', '.join(hosts)}. Exclude fewer.")
    return Fact(left, f"{source} with {len(hosts)} host{'s' if len(hosts) > 1 else ''}")


def _chosen(text: str) -> dict[str, set[int]]:
    """Returns the slots that ``host:0,1@other`` names, by host; an empty set for all of them."""
    chosen: dict[str, set[int]] = {}
    for item in text.split("@"):
        found = re.fullmatch(r"([\w.-]+)(?::(\d+(?:,\d+)*))?", item.strip())
        if found is None:
            raise UsageError(
                f"deepspeed expects HOST:SLOT,SLOT@HOST, found {item!r} in {text!r}. Write slots as numbers."
            )
        chosen.setdefault(found[1], set()).update(map(int, found[2].split(",")) if found[2] else ())
    return chosen


def _check_slots(text: str, host: str, slots: set[int], hosts: Mapping[str, int]) -> None:
    if hosts and slots and max(slots) >= hosts[host]:
        raise UsageError(f"deepspeed's {text}: {host} has no slot {max(slots)}: its slots are 0 to {hosts[host] - 1}.")


def _count(name: str, options: Mapping[str, str]) -> int | None:
    """Returns a count that is given; deepspeed reads -1 as none."""
    text = options.get(name, "-1")
    if text == "-1":
        return None
    return whole_number(name.replace("-", "_"), text)


def whole_number(option: str, text: str) -> int:
    """
    Args:
        option: name of a launcher's option, without dashes in front.

    Raises:
        UsageError: its text is no whole number above 0.
    """
    value = leading(text) if text.isdecimal() else None
    if value is None:
        raise UsageError(
            f"the launcher's --{option} expects a whole number of at least 1, found {text or 'nothing'!r}. Set the "
            "variable that the script passes there, as your cluster does: NAME=VALUE lancet ..."
        )
    return value
