"""How messages travel between simulated ranks: three kinds of links for the engine.

- :class:`SerialLinks`: a rank's messages go out one after the other over its own link. One goes out when all ranks
  have issued it (gloo sends when the receiver is ready), and has come to a rank when the parts of all others have. A
  part that is sent behind another comes no earlier than ``queued_ms`` after it, so that a latency counts once in a row
  of messages, and the tokens that a shaped link gathers at rest are spent by the first.
- :class:`Collectives`: one starts when all ranks have issued it and the one before has ended, and takes as long as the
  largest part.
- :class:`~megatron_lancet.planning.simulation.shared_links.SharedLinks`: several messages share a rank's link.

Columns are the numbers of simulated ranks, from 0.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from megatron_lancet.planning.simulation.buckets import Reduction

NEVER = float("inf")


@dataclass(frozen=True)
class Network:
    """What the profile says about links; see :class:`~megatron_lancet.planning.profile.LinkTimes`.

    Attributes:
        same_ranks: by column, how many ranks of the group behave like it.
    """

    counts_ms: float
    sends_share_link: bool
    compute_slowdown: float
    same_ranks: tuple[int, ...]
    dispatches_apart: bool = False


@dataclass(slots=True, eq=False)
class Message:
    """One all-to-all. Lists and tuples are by column.

    Attributes:
        number: counts messages in the order in which they were issued first, from 0.
        layer: global number.
        alone_ms: what each rank's part takes.
        queued_ms: by which a part that is sent behind another comes after that.
        num_bytes: of each rank's part, sent to others.
        arrival_ms: when it comes to the rank; never, while that is not known.
        issued_ms: when the rank issued it.
        sent_ms: when the rank's part could go onto the link.
        ready_ms: when the last rank's part could be sent.
        num_ready: ranks that have issued it and know how much to send.
        waiting: columns that wait for it with nothing left to do, and don't know for how long.
    """

    number: int
    layer: int
    kind: str
    chunk: int
    alone_ms: Sequence[float]
    queued_ms: Sequence[float]
    num_bytes: Sequence[int]
    arrival_ms: list[float]
    issued_ms: list[float]
    sent_ms: list[float]
    ready_ms: float = 0.0
    num_ready: int = 0
    waiting: list[int] = field(default_factory=list)


class Launch(NamedTuple):
    """Event: a rank launches a gradient reduction."""

    column: int
    reduction: Reduction


class PartSent(NamedTuple):
    """Event: a rank will have sent something then, unless its link has changed since.

    Attributes:
        version: of the rank's link.
    """

    column: int
    version: int


LinkEvent = Launch | PartSent


class Clock(Protocol):
    """The engine, as links see it."""

    def call_at(self, time_ms: float, event: LinkEvent) -> None:
        """Hand ``event`` to :meth:`Links.advance` at that time."""

    def arrive(self, message: Message, columns: Iterable[int]) -> None:
        """It is known when ``message`` comes to these ranks: its ``arrival_ms`` says it."""

    def reduce(self, reduction: Reduction, launched_ms: Sequence[float], end_ms: float) -> None:
        """A reduction that ranks launched at ``launched_ms`` has ended."""


class Links(ABC):
    """The links of all ranks in one phase of a micro-batch.

    Attributes:
        network: their figures.
        free_ms: by column, when the rank's link will have sent what is known to be on it; one list, changed in place.
        next_ms: when something will have been sent that is not known yet; never, where arrivals are known at once.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.next_ms = NEVER
        self.free_ms = [-NEVER] * len(network.same_ranks)  # they have rested

    @abstractmethod
    def send(self, message: Message, clock: Clock) -> None:
        """All ranks have issued ``message`` and know how much to send, the last of them now, at its ``ready_ms``."""

    def advance(self, time_ms: float, event: LinkEvent, clock: Clock) -> None:
        """An event of these links happens."""
        raise AssertionError(f"{type(self).__name__} know no {event}")


class SerialLinks(Links):
    """Each rank has a link of its own, on which its parts go out one after the other."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._columns = range(len(network.same_ranks))
        self._is_pair = network.same_ranks == (1, 1)

    def send(self, message: Message, clock: Clock) -> None:
        """Every rank's part goes onto its link."""
        ready_ms, alone_ms, queued_ms, free_ms = message.ready_ms, message.alone_ms, message.queued_ms, self.free_ms
        for column in self._columns:
            free_ms[column] = max(ready_ms + alone_ms[column], free_ms[column] + queued_ms[column])
        if self._is_pair:  # the same, written out: planning spends much of its time here
            message.arrival_ms = free_ms[::-1]
        else:
            message.arrival_ms = [
                # A rank without others waits for nothing.
                max([ready_ms, *(free for other, free in enumerate(free_ms) if other != column or number > 1)])
                for column, number in enumerate(self.network.same_ranks)
            ]
        clock.arrive(message, self._columns)


class InOrder:
    """Holds messages back until all that were issued before them can be sent: collectives start in one order."""

    def __init__(self) -> None:
        self._held: dict[int, Message] = {}
        self._num_released = 0

    def release(self, message: Message) -> list[Message]:
        """Those that start now that ``message`` can be sent, in order."""
        self._held[message.number] = message
        released = []
        while self._num_released in self._held:
            released.append(self._held.pop(self._num_released))
            self._num_released += 1
        return released


class Collectives(Links):
    """All ranks together run one collective at a time."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._order = InOrder()

    def send(self, message: Message, clock: Clock) -> None:
        """It starts behind those that were issued before it."""
        num_ranks = len(self.free_ms)
        for started in self._order.release(message):
            free_ms = self.free_ms[0]
            # All parts are equal.
            arrival_ms = max(started.ready_ms + started.alone_ms[0], free_ms + started.queued_ms[0])
            started.sent_ms = [max(started.ready_ms, free_ms)] * num_ranks
            started.arrival_ms = [arrival_ms] * num_ranks
            self.free_ms[:] = [arrival_ms] * num_ranks
            clock.arrive(started, range(num_ranks))
