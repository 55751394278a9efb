"""Models of the links between simulated ranks, for the engine.

- :class:`SerialLinks`: each rank sends its parts of messages one after the other over its own link. A part is sent when
  all ranks have issued the message (gloo sends when the receiver is ready); the message arrives at a rank with the last
  part from another. A part that is queued behind another arrives at least ``queued_ms`` after it, so the latency counts
  once in a row of messages, and so does the burst that a shaped link allows after a rest.
- :class:`Collectives`: a message starts when all ranks have issued it and the previous one has ended, and takes as long
  as its largest part.
- :class:`~megatron_lancet.planning.simulation.shared_links.SharedLinks`: several messages share a rank's link.

Messages of two hops have two wires, so two of these: each with its own order and free times, and both at once.

A column is the index of a simulated rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from megatron_lancet.planning.simulation.buckets import Reduction

NEVER = float("inf")


@dataclass(frozen=True)
class Network:
    """The profile's figures of links; see :class:`~megatron_lancet.planning.profile.LinkTimes`.

    Attributes:
        same_ranks: by column, the number of ranks of the group that it represents.
    """

    counts_ms: float
    sends_share_link: bool
    compute_slowdown: float
    same_ranks: tuple[int, ...]
    dispatches_apart: bool = False
    host_polls: bool = True
    memory_slowdown: float = 1.0
    launch_ms: float = 0.0


@dataclass(slots=True, eq=False)
class Message:
    """One all-to-all. Lists and tuples are by column.

    Attributes:
        links: the links that it is sent over.
        number: index in the order of first issue among the messages of these links, from 0.
        place: its layer, see ``lowering.py``.
        is_forward: whether it belongs to a forward.
        alone_ms: time of each rank's part on an idle link.
        queued_ms: time by which a part arrives after the previous one if it is queued behind that.
        num_bytes: size of each rank's part, sent to others.
        arrival_ms: when it arrives at the rank; ``NEVER`` while that is unknown.
        issued_ms: when the rank issued it.
        sent_ms: when the rank's part could be sent.
        ready_ms: when the last rank's part could be sent.
        num_ready: number of ranks that have issued it and have its size.
        waiting: columns that wait for it without other work while its arrival is unknown.
    """

    links: "Links"
    number: int
    place: int
    is_forward: bool
    kind: str
    chunk: int
    tile: int | None
    alone_ms: Sequence[float]
    queued_ms: Sequence[float]
    num_bytes: Sequence[int]
    arrival_ms: list[float]
    issued_ms: list[float]
    sent_ms: list[float]
    ready_ms: float = 0.0
    num_ready: int = 0
    waiting: list[int] = field(default_factory=list)


class LaunchReduction(NamedTuple):
    """Event: a rank launches a gradient reduction."""

    column: int
    reduction: Reduction


class PartSent(NamedTuple):
    """Event: a rank has sent a part, unless the version of its link has changed since."""

    column: int
    version: int


LinkEvent = LaunchReduction | PartSent


class Clock(Protocol):
    """The interface of the engine for links."""

    def call_at(self, time_ms: float, event: LinkEvent) -> None:
        """Passes ``event`` to :meth:`Links.advance` at that time."""

    def arrive(self, message: Message, columns: Iterable[int]) -> None:
        """Notes that the ``arrival_ms`` of ``message`` is known for these columns."""

    def reduce(self, reduction: Reduction, launched_ms: Sequence[float], end_ms: float) -> None:
        """Notes that a reduction has ended that ranks launched at ``launched_ms``, by column."""


class Links(ABC):
    """The links of all ranks in one phase of a micro-batch, over which some or all kinds of messages are sent.

    Attributes:
        num_messages: number of messages that were issued for these links.
        free_ms: by column, when the rank's link will be idle if no more is sent; one list, changed in place.
        next_ms: when the next part of unknown arrival will have been sent; ``NEVER`` if arrivals are known at once.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.num_messages = 0
        self.next_ms = NEVER
        self.free_ms = [-NEVER] * len(network.same_ranks)  # idle for long

    @abstractmethod
    def send(self, message: Message, clock: Clock) -> None:
        """Sends a message that all ranks have issued with its size, the last one now, at ``ready_ms``."""

    def advance(self, time_ms: float, event: LinkEvent, clock: Clock) -> None:
        """Handles an event of these links."""
        raise AssertionError(f"{type(self).__name__} have no {event}")


class SerialLinks(Links):
    """Links of one rank each, on which parts are sent one after the other."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._columns = range(len(network.same_ranks))
        self._is_pair = network.same_ranks == (1, 1)

    def send(self, message: Message, clock: Clock) -> None:
        """Sends every rank's part on its link."""
        ready_ms, alone_ms, queued_ms, free_ms = message.ready_ms, message.alone_ms, message.queued_ms, self.free_ms
        for column in self._columns:
            free_ms[column] = max(ready_ms + alone_ms[column], free_ms[column] + queued_ms[column])
        if self._is_pair:  # same result, faster: planning spends much of its time here
            message.arrival_ms = free_ms[::-1]
        else:
            message.arrival_ms = [
                # A single rank waits for nothing.
                max([ready_ms, *(free for other, free in enumerate(free_ms) if other != column or number > 1)])
                for column, number in enumerate(self.network.same_ranks)
            ]
        clock.arrive(message, self._columns)


class InOrder:
    """Delays messages until all that were issued before them can be sent: collectives start in order of issue."""

    def __init__(self) -> None:
        self._held: dict[int, Message] = {}
        self._num_released = 0

    def release(self, message: Message) -> list[Message]:
        """Notes that ``message`` can be sent; returns the messages that start now, in order."""
        self._held[message.number] = message
        released = []
        while self._num_released in self._held:
            released.append(self._held.pop(self._num_released))
            self._num_released += 1
        return released


class Collectives(Links):
    """Links on which all ranks run one collective at a time."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._order = InOrder()

    def send(self, message: Message, clock: Clock) -> None:
        """Starts the message after those that were issued before it."""
        num_ranks = len(self.free_ms)
        for started in self._order.release(message):
            free_ms = self.free_ms[0]
            # All parts are equal.
            arrival_ms = max(started.ready_ms + started.alone_ms[0], free_ms + started.queued_ms[0])
            started.sent_ms = [max(started.ready_ms, free_ms)] * num_ranks
            started.arrival_ms = [arrival_ms] * num_ranks
            self.free_ms[:] = [arrival_ms] * num_ranks
            clock.arrive(started, range(num_ranks))
