"""Reads a trace of torch.profiler (Kineto, Chrome format): nested host ops by thread, kernels, groups and steps."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.from_trace.lacks import TraceLacks

_STEP = re.compile(r"ProfilerStep#(\d+)")
_KERNEL_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCH_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})
_BYTES_OF_TYPE = {
    "double": 8, "float": 4, "float32": 4, "c10::bfloat16": 2, "bfloat16": 2, "c10::half": 2, "half": 2, "float16": 2,
    "long int": 8, "long": 8, "int": 4, "unsigned char": 1, "c10::float8_e4m3fn": 1, "float8_e4m3fn": 1,
}  # fmt: skip
_GROUP_SUFFIX = "_GROUP"


@dataclass(slots=True)
class Event:
    """An op of the host, or a kernel.

    Attributes:
        start_us: on the clock of the trace.
        end_us: the same for its end.
        thread: that it ran on; the stream of a kernel.
        children: ops that it called.
    """

    name: str
    start_us: float
    end_us: float
    thread: object
    args: Mapping[str, Any]
    children: "list[Event]" = field(default_factory=list)

    @property
    def sequence(self) -> int | None:
        """Autograd's sequence number, of a forward op's node and of the node's run in the backward pass."""
        found = self.args.get("Sequence number")
        return found if isinstance(found, int) else None

    @property
    def dims(self) -> list[Any]:
        """Sizes of the tensors that it was called with; empty where shapes were not recorded."""
        found = self.args.get("Input Dims")
        return found if isinstance(found, list) else []

    @property
    def scalars(self) -> list[str]:
        """The other arguments as text, by place; empty where shapes were not recorded."""
        found = self.args.get("Concrete Inputs")
        return found if isinstance(found, list) else []

    def element_bytes(self, place: int) -> int:
        """Bytes of one element of the tensor at a place of the arguments; 4 where the type is unknown."""
        types = self.args.get("Input type")
        name = types[place] if isinstance(types, list) and place < len(types) else ""
        return _BYTES_OF_TYPE.get(str(name).lower(), 4)

    def walk(self) -> "Iterator[Event]":
        """The op and everything below it, in the order of their starts."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class RankEvents:
    """One rank's record.

    Attributes:
        path: of the trace, for messages.
        groups: ranks of this rank's process groups, by Megatron's name without the suffix, e.g. TENSOR_MODEL_PARALLEL.
        device: name of its GPU; None for a run on the CPU.
        num_sms: multiprocessors of that; 0 if unknown.
        steps: begin and end of each recorded step in us.
        main: outermost host ops of the thread that runs the steps.
        others: events of other threads, one of which runs the backward on a GPU.
        kernels: on the GPU, by start.
        launches: host thread and time at which a kernel was launched, by correlation.
    """

    path: str
    rank: int
    world_size: int
    groups: Mapping[str, tuple[int, ...]]
    device: str | None
    num_sms: int
    steps: tuple[tuple[float, float], ...]
    main: Sequence[Event]
    others: Sequence[Event]
    kernels: Sequence[Event]
    launches: Mapping[int, float]

    def group_size(self, name: str) -> int:
        """Ranks of a group of Megatron's; 1 where the trace does not name it."""
        return len(self.groups.get(name, (self.rank,)))


def read_events(path: Path) -> RankEvents:
    """Reads a trace, ``.json`` or ``.json.gz``.

    Raises:
        TraceLacks: it has no steps, or does not say whose it is.
        RecordError: the file can't be read, or is no trace.
    """
    value = _parsed(path)
    events = value.get("traceEvents")
    if not isinstance(events, list):
        raise RecordError(f"{path}: expected a trace with traceEvents, found none")
    complete = [one for one in events if isinstance(one, dict) and one.get("ph") == "X" and "ts" in one]
    markers = [one for one in complete if _STEP.fullmatch(str(one.get("name"))) and one.get("cat") != _ON_GPU]
    if not markers:
        raise TraceLacks(str(path), "no step markers (ProfilerStep)")
    main_thread = markers[0].get("tid")
    by_thread: dict[object, list[Event]] = {}
    for one in complete:
        if one.get("cat") == "cpu_op":
            by_thread.setdefault(one.get("tid"), []).append(_event(one))
    about = value.get("distributedInfo")
    if not isinstance(about, dict) or not isinstance(about.get("rank"), int):
        raise TraceLacks(str(path), "no distributedInfo (rank, world size and process groups)", "Record a torchrun job")
    devices = value.get("deviceProperties") or [{}]
    return RankEvents(
        path=str(path),
        rank=about["rank"],
        world_size=int(about.get("world_size", 1)),
        groups=_groups(about),
        device=devices[0].get("name"),
        num_sms=int(devices[0].get("numSms", 0)),
        steps=tuple(sorted((float(one["ts"]), float(one["ts"]) + float(one["dur"])) for one in markers)),
        main=_nested(by_thread.pop(main_thread, [])),
        others=[op for ops in by_thread.values() for op in _nested(ops)],
        kernels=sorted(
            (_event(one) for one in complete if one.get("cat") in _KERNEL_CATEGORIES), key=lambda one: one.start_us
        ),
        launches={
            one["args"]["correlation"]: float(one["ts"])
            for one in complete
            if one.get("cat") in _LAUNCH_CATEGORIES and "correlation" in one.get("args", {})
        },
    )


_ON_GPU = "gpu_user_annotation"
"""Category of the copies of annotations on the GPU's streams."""


def _parsed(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        value = json.loads(data)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise RecordError(f"{path}: no trace, or damaged: {error}") from error
    if not isinstance(value, dict):
        raise RecordError(f"{path}: expected an object with traceEvents, found {type(value).__name__}")
    return value


def _event(one: Mapping[str, Any]) -> Event:
    start_us = float(one["ts"])
    args = one.get("args")
    end_us = start_us + float(one.get("dur", 0.0))
    return Event(str(one.get("name")), start_us, end_us, one.get("tid"), args if isinstance(args, dict) else {})


def _nested(events: list[Event]) -> list[Event]:
    """The outermost ops of one thread, with those that they called below them."""
    outermost: list[Event] = []
    open_ops: list[Event] = []
    for event in sorted(events, key=lambda one: (one.start_us, -one.end_us)):
        while open_ops and open_ops[-1].end_us <= event.start_us:
            open_ops.pop()
        (open_ops[-1].children if open_ops else outermost).append(event)
        open_ops.append(event)
    return outermost


def _groups(about: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for group in about.get("pg_config") or []:
        ranks = group.get("ranks")
        if isinstance(ranks, list) and about["rank"] in ranks:
            found.setdefault(str(group.get("pg_desc")).removesuffix(_GROUP_SUFFIX), tuple(ranks))
    return found
