"""The link of a traced step: how long its messages take, by bytes, found from the step's own messages.

The links are the simulator's (``planning/simulation/``). A part of a message takes a latency, the latency of the
quickest exchange of token counts, and its bytes at one rate. The rate is the one with which messages that are launched
when they were launched arrive closest to when they arrived (the sum of absolute differences, so that a few messages of
a rank that was interrupted do not matter).
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_lancet.lab.causes.traced import Key, TracedRank, kind_of
from megatron_lancet.planning.simulation.buckets import Reduction
from megatron_lancet.planning.simulation.links import (
    NEVER,
    Collectives,
    LinkEvent,
    Links,
    Message,
    Network,
    SerialLinks,
)
from megatron_lancet.planning.simulation.shared_links import SharedLinks
from megatron_lancet.schedule.ops import INSIDE_NODE, Op, OpKind, Phase

_NUM_TRIALS = 24
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class LinkKind:
    """How the messages of a run are sent.

    Attributes:
        sends_share_link: gloo: each rank sends its parts one after the other. NCCL: one collective at a time.
        dispatches_apart: forward dispatches have connections of their own, and share the link with the others.
    """

    sends_share_link: bool = True
    dispatches_apart: bool = False

    def links(self, num_ranks: int) -> Links:
        """New links, all idle."""
        network = Network(0.0, self.sends_share_link, 1.0, (1,) * num_ranks, self.dispatches_apart)
        if self.dispatches_apart:
            return SharedLinks(network)
        return SerialLinks(network) if self.sends_share_link else Collectives(network)


@dataclass(frozen=True)
class Payload:
    """A message with rows on all ranks of a group. Tuples are by rank of the group.

    Attributes:
        sent_bytes: what a rank sends to others.
        num_bytes: what a rank's part keeps its link busy for: what it sends, or what the rank that gets most of its
            group receives, if that is more. Where one collective runs at a time, all have the largest.
        launched_ms: when the rank launched it.
        arrived_ms: when the rank had it.
    """

    key: Key
    sent_bytes: tuple[int, ...]
    num_bytes: tuple[int, ...]
    launched_ms: tuple[float, ...]
    arrived_ms: tuple[float, ...]

    @property
    def is_inside_node(self) -> bool:
        """Whether it stays inside a node, whose link is another one."""
        return kind_of(self.key[0]) in INSIDE_NODE

    def even(self) -> "tuple[float, ...]":
        """The same bytes spread evenly."""
        return (sum(self.sent_bytes) / len(self.sent_bytes),) * len(self.sent_bytes)


@dataclass(frozen=True)
class Wire:
    """Times of messages.

    Attributes:
        latency_ms: of a message without bytes.
        ms_per_byte: beyond that, of messages between nodes or to all ranks.
        inside_ms_per_byte: of messages that stay inside a node.
    """

    latency_ms: float
    ms_per_byte: float
    inside_ms_per_byte: float

    def times_ms(self, payload: Payload, num_bytes: Sequence[float]) -> tuple[list[float], list[float]]:
        """Of each rank's part: its time alone on an idle link, and behind another part."""
        per_byte = self.inside_ms_per_byte if payload.is_inside_node else self.ms_per_byte
        queued = [size * per_byte for size in num_bytes]
        return [self.latency_ms + ms if ms > 0 else 0.0 for ms in queued], queued


def payloads_of(ranks: Sequence[TracedRank], kind: LinkKind) -> list[Payload]:
    """The messages with rows that all ranks of a group have, by the time at which the last rank launched them."""
    spans = [rank.messages() for rank in ranks]
    found = []
    for key in spans[0]:
        if kind_of(key[0]) is OpKind.COUNTS or not all(key in own for own in spans):
            continue
        own = [messages[key] for messages in spans]
        sent = tuple(span.num_bytes for span in own)
        busy = _busy_bytes(sent, [_bytes_to(rank, key) for rank in ranks])
        found.append(
            Payload(
                key,
                sent,
                tuple(busy) if kind.sends_share_link else (max(busy),) * len(busy),
                tuple(span.start_ms for span in own),
                tuple(span.end_ms for span in own),
            )
        )
    return sorted(found, key=lambda payload: max(payload.launched_ms))


def _bytes_to(rank: TracedRank, key: Key) -> tuple[int, ...]:
    of_name = (rank.bytes_to or {}).get(key[0], ())
    return of_name[key[1]] if key[1] < len(of_name) else ()


def _busy_bytes(sent: Sequence[int], to_each: Sequence[Sequence[int]]) -> list[int]:
    """By rank, the bytes for which its link is busy; see :class:`Payload`."""
    if len(sent) < 3 or any(len(row) != len(sent) for row in to_each):
        return list(sent)
    received = [sum(column) for column in zip(*to_each, strict=True)]
    return [
        max(own, *(received[other] if row[other] else 0 for other in range(len(row))))
        for own, row in zip(sent, to_each, strict=True)
    ]


def message_of(links: Links, payload: Payload, wire: Wire, num_bytes: Sequence[float]) -> Message:
    """A message for the simulator's links."""
    op, count = Op.parse(payload.key[0]), len(num_bytes)
    alone_ms, queued_ms = wire.times_ms(payload, num_bytes)
    message = Message(
        links, links.num_messages, op.layer or 0, op.phase is Phase.FORWARD, op.kind, op.chunk or 0, op.tile,
        alone_ms, queued_ms, [round(size) for size in num_bytes], [NEVER] * count, [NEVER] * count, [NEVER] * count,
    )  # fmt: skip
    links.num_messages += 1
    return message


def fit_wire(kind: LinkKind, payloads: Sequence[Payload], counts_ms: Sequence[float], num_ranks: int) -> Wire:
    """The link of a step.

    Args:
        counts_ms: times of the exchanges of token counts from the launch by the last rank; empty without any.
    """
    latency_ms = max(0.0, min(counts_ms, default=0.0))

    def per_byte(of_kind: Sequence[Payload]) -> float:
        first = _first_guess(of_kind, latency_ms)
        if not first:
            return 0.0
        return _smallest(lambda rate: _error_ms(kind, of_kind, Wire(latency_ms, rate, rate), num_ranks), first)

    inside = [payload for payload in payloads if payload.is_inside_node]
    return Wire(latency_ms, per_byte([one for one in payloads if not one.is_inside_node]), per_byte(inside))


def _first_guess(payloads: Iterable[Payload], latency_ms: float) -> float:
    """Median of the times per byte from the launch by the last rank on, each weighted by its bytes."""
    found = []
    for payload in payloads:
        ready_ms = max(payload.launched_ms)
        for receiver, arrived_ms in enumerate(payload.arrived_ms):
            size = max(own for sender, own in enumerate(payload.num_bytes) if sender != receiver)
            if size:
                found.append((max(0.0, arrived_ms - ready_ms - latency_ms) / size, size))
    half = sum(size for _, size in found) / 2
    for per_byte, size in sorted(found):
        half -= size
        if half <= 0:
            return per_byte
    return 0.0


def _smallest(error: Callable[[float], float], guess: float) -> float:
    """Where ``error`` is smallest between an eighth of a guess and its double, by golden section."""
    low, high = guess / 8, guess * 2
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = error(left), error(right)
    for _ in range(_NUM_TRIALS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = error(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = error(right)
    return (low + high) / 2


def _error_ms(kind: LinkKind, payloads: Sequence[Payload], wire: Wire, num_ranks: int) -> float:
    """Sum over messages and ranks of how far arrivals are from the measured ones, launches being as measured."""
    beyond_ms = beyond_link_ms(kind, payloads, wire, num_ranks)
    return sum(abs(ms) for of_ranks in beyond_ms.values() for ms in of_ranks)


def beyond_link_ms(
    kind: LinkKind, payloads: Sequence[Payload], wire: Wire, num_ranks: int
) -> dict[Key, tuple[float, ...]]:
    """How much later than by the link each message was at each rank, launches being as measured; below 0 if earlier."""
    inside = _Arrivals(LinkKind(kind.sends_share_link).links(num_ranks))
    others = _Arrivals(kind.links(num_ranks))
    for payload in payloads:
        (inside if payload.is_inside_node else others).send(payload, wire)
    found = {}
    for queue in (inside, others):
        queue.run_until(NEVER)
        for message, payload in queue.sent:
            both = zip(message.arrival_ms, payload.arrived_ms, strict=True)
            found[payload.key] = tuple(measured - by_link for by_link, measured in both)
    return found


class _Arrivals:
    """Links on which messages are sent at known times."""

    def __init__(self, links: Links) -> None:
        self.sent: list[tuple[Message, Payload]] = []
        self._links = links
        self._events: list[tuple[float, int, LinkEvent]] = []
        self._num_events = 0

    def send(self, payload: Payload, wire: Wire) -> None:
        """Sends a message when the last rank has launched it, not before the one that was sent last."""
        ready_ms = max(payload.launched_ms)
        self.run_until(ready_ms)
        message = message_of(self._links, payload, wire, payload.num_bytes)
        message.ready_ms, message.sent_ms = ready_ms, [ready_ms] * len(payload.launched_ms)
        self.sent.append((message, payload))
        self._links.send(message, self)

    def run_until(self, time_ms: float) -> None:
        """Lets the links send what they can until then."""
        while self._events and self._events[0][0] <= time_ms:
            at_ms, _, event = heapq.heappop(self._events)
            self._links.advance(at_ms, event, self)

    def call_at(self, time_ms: float, event: LinkEvent) -> None:
        """See :class:`~megatron_lancet.planning.simulation.links.Clock`, as for the other two."""
        self._num_events += 1
        heapq.heappush(self._events, (time_ms, self._num_events, event))

    def arrive(self, message: Message, columns: Iterable[int]) -> None:
        """Arrivals are read from the messages."""

    def reduce(self, reduction: Reduction, launched_ms: Sequence[float], end_ms: float) -> None:
        """Reductions are not replayed."""
        raise AssertionError(f"{reduction.name} was never launched")


def counts_of(ranks: Sequence[TracedRank]) -> Mapping[Key, float]:
    """Times of the exchanges of token counts that all ranks have: from the launch by the last rank to the arrival.

    The arrival is the middle one of the ranks': reading its time may come late on one that is busy.
    """
    spans = [rank.messages() for rank in ranks]
    found = {}
    for key in spans[0]:
        if kind_of(key[0]) is OpKind.COUNTS and all(key in own for own in spans):
            ends = sorted(own[key].end_ms for own in spans)
            found[key] = max(0.0, ends[(len(ends) - 1) // 2] - max(own[key].start_ms for own in spans))
    return found
