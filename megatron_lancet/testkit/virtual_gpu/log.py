"""The log of what a program has enqueued, in the order in which the host did it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that was enqueued.

    Attributes:
        name: operator, for example ``aten::mm``.
        flops: multiplications and additions of matrix products; 0 for others.
        num_bytes: bytes that it reads and writes.
    """

    stream: int
    name: str
    flops: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GraphLaunched:
    """A graph was launched; the next entries are its kernels, which the host does not launch."""

    stream: int
    num_kernels: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event was recorded on a stream. An event that is recorded again has another number."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class StreamWaits:
    """A stream got a wait for an event."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class HostWaits:
    """The host waited for an event, or for all that was enqueued on a stream.

    Attributes:
        reason: what it waited for: ``event``, ``stream``, or the operator that needed a value.
        site: where in the program.
    """

    event: int | None
    stream: int | None
    reason: str
    site: str


@dataclass(frozen=True, slots=True)
class CollectiveBegins:
    """What is logged until the matching end is the work of one collective, on this stream.

    Attributes:
        group: name of the process group.
        num_ranks: size of the group.
        bytes_to_others: bytes that this rank sends to other ranks.
    """

    stream: int
    name: str
    group: str
    num_ranks: int
    bytes_to_others: float


@dataclass(frozen=True, slots=True)
class CollectiveEnds:
    """End of the collective that began last on this stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in the host's program, for example the end of an op.

    Attributes:
        kind: ``end`` of an op, or ``begin``/``resume`` around what interrupts it.
    """

    kind: str
    name: str


Entry = Kernel | GraphLaunched | Recorded | StreamWaits | HostWaits | CollectiveBegins | CollectiveEnds | Mark
