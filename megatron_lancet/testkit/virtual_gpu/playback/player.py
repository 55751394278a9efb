"""Plays a log in time: when does each kernel and each message of it start and end?

Events are recorded before they are waited for, so one pass in the host's order is enough. The host enqueues without
end; a stream starts its next kernel when the host has launched it, its last one has ended, and all events that the
stream waits for have been reached. Messages of one group queue for its link.

Where messages slow down kernels, or queue for one link, the log is played again with the messages of the pass before,
until none of them moves any more. A time depends on earlier ones only, so each pass is right for longer. A
persistent product sees only messages that the host launched before it, and a message only earlier products.

Time for which compute stands still is divided into three: it waits for a message that is on the wire; the host waits
for a value, such as token counts, and enqueues nothing; the rest, in which the host has not launched the next kernel
yet, or the kernel waits for one of another stream, or behind one in a hardware queue.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_lancet.testkit.virtual_gpu.log import (
    CollectiveBegins,
    CollectiveEnds,
    Entry,
    GraphLaunched,
    HostWaits,
    Kernel,
    Mark,
    Recorded,
    StreamWaits,
)
from megatron_lancet.testkit.virtual_gpu.playback.device_model import DeviceModel
from megatron_lancet.testkit.virtual_gpu.playback.intervals import Interval, IntervalsInOrder, overlap_us, union_of


@dataclass(frozen=True)
class PlayedMessage:
    """A collective on the wire.

    Attributes:
        name: collective, for example ``all_to_all``.
        bytes_to_others: bytes that this rank sends to other ranks.
        ready_us: time at which it would start on a free link.
    """

    name: str
    group: str
    stream: int
    bytes_to_others: float
    on_wire: Interval
    ready_us: float


@dataclass(frozen=True)
class Playback:
    """The times of a log.

    Attributes:
        kernels: by place in the log; those that a collective consists of count for its message.
        messages: in the order of their launches.
        events_us: time at which each event is reached, by its number.
        marks: each mark with the time at which the compute stream reaches it.
        marks_on_host_us: time at which the host sets each mark.
        step_us: until the last kernel or message ends and the host is done.
        busy_us: time for which the compute stream runs kernels.
        for_messages_us: time for which compute stands still while a message that it waits for is on the wire. It
            includes messages on the compute stream itself.
        for_counts_us: time for which compute stands still because the host waits for a value.
        for_launches_us: time for which compute stands still for the host's launches, or for kernels of other streams.
    """

    kernels: dict[int, Interval]
    messages: Sequence[PlayedMessage]
    events_us: dict[int, float]
    marks: Sequence[tuple[Mark, float]]
    marks_on_host_us: Sequence[float]
    step_us: float
    busy_us: float
    for_messages_us: float
    for_counts_us: float
    for_launches_us: float

    @property
    def wire_us(self) -> float:
        """Time for which messages are on the wire, summed."""
        return sum(message.on_wire.us for message in self.messages)

    @property
    def exposed_us(self) -> float:
        """Time for which compute stands still for messages, token counts included."""
        return self.for_messages_us + self.for_counts_us

    @property
    def exposed_share(self) -> float:
        """Exposed time by time on the wire; 0 without messages."""
        return self.exposed_us / self.wire_us if self.messages else 0.0


_MOST_PASSES = 200
_SAME_US = 1e-3
"""A message that moves by less between two passes stays where it is."""


def play(log: Iterable[Entry], device: DeviceModel, compute: int = 0) -> Playback:
    """Plays a log.

    Args:
        compute: stream on which the program computes.

    Raises:
        RuntimeError: messages that slow down kernels, or queue for one link, still move after many passes.
    """
    log = tuple(log)
    played = _play_once(log, device, compute, ())
    if not device.messages_meet:
        return played
    for _ in range(_MOST_PASSES):
        before, played = played, _play_once(log, device, compute, played.messages)
        if _are_same(before.messages, played.messages):
            return played
    raise RuntimeError(f"messages still move after {_MOST_PASSES} passes over a log of {len(log)} entries")


def _play_once(log: Sequence[Entry], device: DeviceModel, compute: int, met: Sequence[PlayedMessage]) -> Playback:
    player = _Player(device, compute, met)
    for place, entry in enumerate(log):
        player.take(place, entry)
    return player.result()


def _are_same(some: Sequence[PlayedMessage], others: Sequence[PlayedMessage]) -> bool:
    return all(
        abs(end_us - other_us) < _SAME_US
        for one, other in zip(some, others, strict=True)
        for end_us, other_us in zip(one.on_wire, other.on_wire, strict=True)
    )


class _Player:
    """What has been played so far; times in microseconds."""

    def __init__(self, device: DeviceModel, compute: int, met: Sequence[PlayedMessage]) -> None:
        """
        Args:
            met: messages of the pass before, which kernels and other messages meet; empty in the first pass.
        """
        self._device = device
        self._met = _Met(met)
        self._compute = compute
        self._host_us = 0.0
        self._free_us: defaultdict[int, float] = defaultdict(float)
        """By stream: end of what it has got so far."""
        self._blocked_us: defaultdict[int, float] = defaultdict(float)
        """By stream: time of the latest event that it waits for."""
        self._queue_us: defaultdict[int, float] = defaultdict(float)
        """By hardware queue: start of what is at its end."""
        self._link_us: defaultdict[str, float] = defaultdict(float)
        self._queue_of: dict[int, int] = {}
        self._in_collective: set[int] = set()
        self._num_in_graph = 0
        """Kernels of the last graph that are still to come: the host has launched them with it."""
        self._kernels: dict[int, Interval] = {}
        self._messages: list[PlayedMessage] = []
        self._on_wire: defaultdict[int, IntervalsInOrder] = defaultdict(IntervalsInOrder)
        """By stream: messages."""
        self._products = IntervalsInOrder()
        """Of the compute stream."""
        self._events_us: dict[int, float] = {}
        self._marks: list[tuple[Mark, float]] = []
        self._marks_on_host_us: list[float] = []
        self._busy_us = 0.0
        self._own_messages_us = 0.0
        self._blocked: list[Interval] = []
        """Compute stands still behind an event."""
        self._idle: list[Interval] = []
        """Compute stands still, and every event that it waits for has been reached."""
        self._host_waits: list[Interval] = []

    def take(self, place: int, entry: Entry) -> None:
        match entry:
            case Kernel():
                if entry.stream not in self._in_collective:
                    self._kernels[place] = self._run_kernel(entry)
            case GraphLaunched():
                self._host_us += self._device.launch_us
                self._num_in_graph = entry.num_kernels
            case CollectiveBegins():
                self._send(entry)
            case CollectiveEnds():
                self._in_collective.discard(entry.stream)
            case Recorded():
                self._host_us += self._device.event_us
                self._events_us[entry.event] = self._reaches_us(entry.stream)
            case StreamWaits():
                self._wait(entry)
            case HostWaits():
                self._wait_on_host(entry)
            case Mark():
                self._marks.append((entry, self._reaches_us(self._compute)))
                self._marks_on_host_us.append(self._host_us)

    def result(self) -> Playback:
        on_wire = union_of(message.on_wire for message in self._messages if message.stream != self._compute)
        for_messages_us = overlap_us(self._blocked, on_wire)
        still = [*self._blocked, *self._idle]
        for_counts_us = min(
            overlap_us(still, union_of(self._host_waits)), sum(one.us for one in still) - for_messages_us
        )
        return Playback(
            self._kernels,
            self._messages,
            self._events_us,
            self._marks,
            self._marks_on_host_us,
            max(self._host_us, *self._free_us.values(), 0.0),
            self._busy_us,
            for_messages_us + self._own_messages_us,
            for_counts_us,
            sum(one.us for one in still) - for_messages_us - for_counts_us,
        )

    def _reaches_us(self, stream: int) -> float:
        """Time at which the stream gets to what the host enqueues now."""
        return max(self._host_us, self._free_us[stream], self._blocked_us[stream])

    def _queue(self, stream: int) -> int:
        """The stream's hardware queue: queues are given in turn, in the order in which streams are first used."""
        if stream not in self._queue_of:
            number = len(self._queue_of)
            connections = self._device.connections
            self._queue_of[stream] = number if connections is None else number % connections
        return self._queue_of[stream]

    def _starts_us(self, stream: int) -> float:
        queue = self._queue(stream)
        start_us = max(self._reaches_us(stream), self._queue_us[queue])
        self._queue_us[queue] = start_us
        return start_us

    def _run_kernel(self, kernel: Kernel) -> Interval:
        if self._num_in_graph:
            self._num_in_graph -= 1
        else:
            self._host_us += self._device.launch_us
        start_us = self._starts_us(kernel.stream)
        alone_us = self._device.kernel_us(kernel.flops, kernel.num_bytes)
        if self._device.persistent and kernel.flops:
            ran = self._run_product(kernel.stream, start_us, alone_us)
        elif self._device.message_sms:
            ran = self._met.beside(kernel.stream, start_us, alone_us, self._device.speed_beside_message)
        else:
            ran = Interval(start_us, start_us + alone_us)
        if kernel.stream == self._compute:
            self._stand_still_until(start_us)
            self._busy_us += ran.us
        self._free_us[kernel.stream] = ran.end_us
        return ran

    def _run_product(self, stream: int, start_us: float, alone_us: float) -> Interval:
        wires = [wire for sender, wire in self._on_wire.items() if sender != stream]
        is_beside = any(wire.at(start_us) is not None for wire in wires)
        waves = self._device.waves_beside_message if is_beside else 1
        ran = Interval(start_us, start_us + waves * alone_us)
        if stream == self._compute:
            self._products.add(ran)
        return ran

    def _send(self, collective: CollectiveBegins) -> None:
        stream, group = collective.stream, collective.group
        self._in_collective.add(stream)
        self._host_us += self._device.collective_us if collective.num_ranks > 1 else self._device.launch_us
        ready_us = self._starts_us(stream)
        start_us = max(ready_us, self._link_us[group])
        if self._device.one_link:
            start_us = max(start_us, self._met.link_free_us(group, ready_us))
        is_alone = collective.num_ranks == 1
        if self._device.messages_wait and stream != self._compute and not is_alone:
            product = self._products.at(start_us)
            start_us = start_us if product is None else product.end_us
        duration_us = 0.0 if is_alone else self._device.message_us(group, collective.bytes_to_others)
        on_wire = Interval(start_us, start_us + duration_us)
        if stream == self._compute:
            self._stand_still_until(start_us)
            self._own_messages_us += duration_us
        if not is_alone:
            sent = PlayedMessage(collective.name, group, stream, collective.bytes_to_others, on_wire, ready_us)
            self._messages.append(sent)
            self._on_wire[stream].add(on_wire)
        self._free_us[stream] = self._link_us[group] = on_wire.end_us

    def _stand_still_until(self, start_us: float) -> None:
        free_us = self._free_us[self._compute]
        released_us = min(start_us, max(free_us, self._blocked_us[self._compute]))
        if released_us > free_us:
            self._blocked.append(Interval(free_us, released_us))
        if start_us > released_us:
            self._idle.append(Interval(released_us, start_us))

    def _wait(self, wait: StreamWaits) -> None:
        self._host_us += self._device.event_us
        reached_us = self._events_us.get(wait.event, 0.0)  # an event from before the log has been reached
        self._blocked_us[wait.stream] = max(self._blocked_us[wait.stream], reached_us)
        queue = self._queue(wait.stream)
        self._queue_us[queue] = max(self._queue_us[queue], reached_us)

    def _wait_on_host(self, wait: HostWaits) -> None:
        if wait.event is not None:
            reached_us = self._events_us.get(wait.event, 0.0)
        elif wait.stream is not None:
            reached_us = max(self._free_us[wait.stream], self._blocked_us[wait.stream])
        else:
            reached_us = max((*self._free_us.values(), *self._blocked_us.values()), default=0.0)
        goes_on_us = max(self._host_us, reached_us) + self._device.host_wait_us
        self._host_waits.append(Interval(self._host_us, goes_on_us))
        self._host_us = goes_on_us


class _Met:
    """Messages of the pass before."""

    def __init__(self, messages: Sequence[PlayedMessage]) -> None:
        self._messages = messages
        self._by_stream: dict[int, tuple[list[Interval], list[float]]] = {}
        self._by_group: dict[str, tuple[list[float], list[float]]] = {}

    def beside(self, stream: int, start_us: float, alone_us: float, speed: float) -> Interval:
        """When a kernel runs.

        Args:
            alone_us: its duration with no concurrent message.
            speed: while a message of another stream is on the wire.
        """
        if stream not in self._by_stream:
            union = union_of(one.on_wire for one in self._messages if one.stream != stream)
            self._by_stream[stream] = union, [one.end_us for one in union]
        union, ends_us = self._by_stream[stream]
        at_us, left_us = start_us, alone_us
        for one in union[bisect_right(ends_us, start_us) :]:
            before_us = max(0.0, one.start_us - at_us)
            if left_us <= before_us:
                break
            at_us, left_us = at_us + before_us, left_us - before_us
            inside_us = one.end_us - at_us
            if left_us <= inside_us * speed:
                return Interval(start_us, at_us + left_us / speed)
            at_us, left_us = one.end_us, left_us - inside_us * speed
        return Interval(start_us, at_us + left_us)

    def link_free_us(self, group: str, ready_us: float) -> float:
        """When the messages of other groups that could start before ``ready_us`` have left the link."""
        if group not in self._by_group:
            others = sorted((one.ready_us, one.on_wire.end_us) for one in self._messages if one.group != group)
            ends_us = accumulate((end_us for _, end_us in others), max)
            self._by_group[group] = [ready for ready, _ in others], list(ends_us)
        ready, ends = self._by_group[group]
        num_before = bisect_left(ready, ready_us)
        return ends[num_before - 1] if num_before else 0.0
