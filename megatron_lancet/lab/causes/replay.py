"""Plays a traced step again, as it was or with some causes of waits removed.

Ops keep their durations and their order on each rank, a wait ends when the message is there, and a message is there
when all ranks have launched it and the link has sent it. Deferred weight gradients run in the waits in which the rank
would run them. The links are the simulator's.
"""

import heapq
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from megatron_lancet.lab.causes.program import Code, Item, Programs
from megatron_lancet.lab.causes.traced import CannotReplay, Key, TracedRank, is_message
from megatron_lancet.lab.causes.weight_grads import (
    Deferred,
    WeightGrad,
    is_backward_wait,
    without_weight_grads,
)
from megatron_lancet.lab.causes.wire import (
    LinkKind,
    Payload,
    Wire,
    beyond_link_ms,
    counts_of,
    fit_wire,
    message_of,
    payloads_of,
)
from megatron_lancet.planning.simulation.buckets import Reduction
from megatron_lancet.planning.simulation.links import NEVER, LinkEvent, Links, Message
from megatron_lancet.schedule.timeline import Lane


class Cause(StrEnum):
    """Why ranks wait, in the order of tables."""

    WIRE = "wire"
    """Rows take time on the link, where nothing is left to compute meanwhile."""
    ROWS = "rows"
    """Experts of some ranks receive more rows than the mean."""
    PACE = "pace"
    """A rank comes late, or takes longer than the others for the same op."""
    COUNTS = "token_counts"
    """The exchange of token counts, for which a dispatch waits."""
    HOST = "host"
    """The thread that computes is blocked, or the device has nothing to run because the host is late."""


class Step:
    """A traced step of a group that can be played again.

    Attributes:
        exposed_ms: the measured time for which ranks waited for messages of expert parallelism, mean over the ranks.
    """

    def __init__(self, ranks: Sequence[TracedRank], kind: LinkKind) -> None:
        """
        Args:
            ranks: all ranks of an expert-parallel group in its order, on one clock.

        Raises:
            CannotReplay: the traces don't belong to one step of one group.
        """
        numbers = [rank.rank for rank in ranks]
        if len(set(numbers)) < 2:
            raise CannotReplay(f"expected the traces of at least two ranks, found the traces of ranks {numbers}")
        keys = [frozenset(rank.messages()) for rank in ranks]
        odd = sorted({key for own in keys for key in own ^ keys[0]})
        if odd:
            raise CannotReplay(f"expected the same messages on all ranks, but not all have {odd[0][0]} equally often")
        self.ranks = tuple(ranks)
        self.programs = Programs.of(ranks)
        self.exposed_ms = sum(_exposed_ms(rank) for rank in ranks) / len(ranks)
        self._kind = kind
        self._payloads = {payload.key: payload for payload in payloads_of(ranks, kind)}
        self._counts_ms = counts_of(ranks)

    @cached_property
    def deferred(self) -> list[Deferred]:
        """Items of each rank, and the dWs that may run in other waits."""
        follows_host = self.ranks[0].follows_host
        return [Deferred(items) if follows_host else without_weight_grads(items) for items in self.programs.items]

    @cached_property
    def wire(self) -> Wire:
        """The link, fitted to the step's messages."""
        return fit_wire(self._kind, list(self._payloads.values()), list(self._counts_ms.values()), len(self.ranks))

    def replay(self, removed: frozenset[Cause] = frozenset()) -> float:
        """Plays the step without some causes; returns how long ranks wait in all, mean over them.

        Raises:
            CannotReplay: a rank waits for a message that never comes.
        """
        return _Replay(self, removed).run()

    def counts_ms(self, key: Key, removed: frozenset[Cause]) -> float:
        """Time of an exchange of token counts, from the launch by the last rank on."""
        if Cause.WIRE in removed:  # no rows in front of it
            return min(self._counts_ms.values())
        return self._counts_ms[key]

    @cached_property
    def beyond_link_ms(self) -> dict[Key, tuple[float, ...]]:
        """How much later each message was at each rank than the link explains."""
        return beyond_link_ms(self._kind, list(self._payloads.values()), self.wire, len(self.ranks))

    def beyond_link(self, key: Key, removed: frozenset[Cause]) -> float:
        """How much later than by the link a message is in a replay, at all ranks.

        What differs from rank to rank is not the link's: a rank that comes late finds it rested, and the threads of one
        without a free core send late.
        """
        return 0.0 if Cause.WIRE in removed else statistics.median(self.beyond_link_ms[key])

    @property
    def total_counts_ms(self) -> float:
        """Time of all exchanges of token counts."""
        return sum(self._counts_ms.values())

    def links(self) -> tuple[Links, Links]:
        """New links: of messages inside a node, and of the others."""
        num_ranks = len(self.ranks)
        return LinkKind(self._kind.sends_share_link).links(num_ranks), self._kind.links(num_ranks)

    def message(self, key: Key, links: Links, removed: frozenset[Cause]) -> Message:
        """A new message on ``links``."""
        payload: Payload = self._payloads[key]
        if Cause.WIRE in removed:
            return message_of(links, payload, Wire(0.0, 0.0, 0.0), [0.0] * len(self.ranks))
        return message_of(links, payload, self.wire, payload.even() if Cause.ROWS in removed else payload.num_bytes)

    def is_payload(self, key: Key) -> bool:
        """Whether it is a message with rows, not one with counts."""
        return key in self._payloads

    def is_inside_node(self, key: Key) -> bool:
        """Whether a message with rows stays inside a node."""
        return self._payloads[key].is_inside_node


def _exposed_ms(rank: TracedRank) -> float:
    return sum(span.ms for span in rank.timeline.spans if span.lane is Lane.WAIT and is_message(span.name))


@dataclass(slots=True)
class _Rank:
    """State of a rank in a replay.

    Attributes:
        num_waits: waits of backwards that it has passed.
        num_weight_grads: deferred dWs that have run.
    """

    items: Sequence[Item]
    weight_grads: Sequence[WeightGrad]
    factors: Mapping[Key, float]
    time_ms: float
    index: int = 0
    exposed_ms: float = 0.0
    waits_for: Key | None = None
    num_waits: int = 0
    num_weight_grads: int = 0

    def due(self) -> WeightGrad | None:
        """The next dW, if it must run now."""
        if self.num_weight_grads == len(self.weight_grads):
            return None
        oldest = self.weight_grads[self.num_weight_grads]
        if self.index < oldest.after:
            return None
        return oldest if self.index >= oldest.before or self.num_waits >= oldest.last_wait else None

    def available(self) -> WeightGrad | None:
        """The next dW, if it can run now."""
        if self.num_weight_grads == len(self.weight_grads):
            return None
        oldest = self.weight_grads[self.num_weight_grads]
        return oldest if self.index >= oldest.after else None


_COMPUTE = (Code.WORK, Code.WEIGHT_GRAD)
_Resume = int
"""Event: the rank of that place goes on."""
_Launch = tuple[int, Key]
"""Event: a rank launches a message whose counts have arrived."""


class _Replay:
    """One replay; it is the clock of the simulator's links."""

    def __init__(self, step: Step, removed: frozenset[Cause]) -> None:
        self._step, self._removed = step, removed
        self._inside, self._links = step.links()
        even, punctual = Cause.ROWS in removed, Cause.PACE in removed
        factors = {key: op.factors(even, punctual) for key, op in step.programs.ops.items()} if even or punctual else {}
        self._ranks = [
            _Rank(
                deferred.items,
                deferred.weight_grads,
                {key: of_ranks[place] for key, of_ranks in factors.items()},
                0.0 if punctual else step.programs.late_ms[place],
            )
            for place, deferred in enumerate(step.deferred)
        ]
        self._blocked_share = 0.0 if Cause.HOST in removed else 1.0
        self._messages: dict[Key, Message] = {}
        self._key_of: dict[int, Key] = {}
        self._counts: dict[Key, list[float]] = {}
        self._arrived: dict[Key, list[float]] = {}
        self._needed: dict[Key, list[tuple[int, Key, float]]] = {}
        self._events: list[tuple[float, int, _Resume | _Launch | tuple[Links, LinkEvent]]] = []
        self._num_events = 0
        self._sending: Links = self._links

    def run(self) -> float:
        """Plays all of it; see :meth:`Step.replay`."""
        for place, rank in enumerate(self._ranks):
            self._at(rank.time_ms, place)
        while self._events:
            time_ms, _, event = heapq.heappop(self._events)
            if isinstance(event, int):
                self._resume(event)
            elif isinstance(event[0], Links):
                self._sending = event[0]
                event[0].advance(time_ms, event[1], self)
            else:
                self._launch(event[0], event[1], time_ms)
        stuck = [rank.waits_for for rank in self._ranks if rank.waits_for is not None]
        if stuck:
            raise CannotReplay(f"a rank waits for {stuck[0][0]}, which never arrives")
        return sum(rank.exposed_ms for rank in self._ranks) / len(self._ranks)

    def _at(self, time_ms: float, event: "_Resume | _Launch | tuple[Links, LinkEvent]") -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_ms, self._num_events, event))

    def _resume(self, place: int) -> None:
        """Plays a rank until it must wait, or another event is earlier than its next launch or wait."""
        rank, share = self._ranks[place], self._blocked_share
        while True:
            while rank.index <= len(rank.items) and (weight_grad := rank.due()) is not None:
                self._run_weight_grad(rank, weight_grad)
            if rank.index == len(rank.items):
                return
            code, key, busy_ms, blocked_ms, needs, _ = rank.items[rank.index]
            if code in _COMPUTE:
                rank.time_ms += busy_ms * rank.factors.get(key, 1.0) + blocked_ms * share
                rank.index += 1
                continue
            if self._events and self._events[0][0] < rank.time_ms:
                self._at(rank.time_ms, place)
                return
            if code is Code.LAUNCH:
                rank.index += 1
                self._launch_or_hold(place, key, needs, rank.time_ms)
                continue
            arrived_ms = self._arrival_ms(place, key)
            if arrived_ms > rank.time_ms and (weight_grad := rank.available()) is not None:
                self._run_weight_grad(rank, weight_grad)
                continue
            rank.num_waits += is_backward_wait(rank.items[rank.index])
            rank.index += 1
            if arrived_ms == NEVER:
                rank.waits_for = key
                return
            self._pass(rank, arrived_ms)

    def _run_weight_grad(self, rank: _Rank, weight_grad: WeightGrad) -> None:
        item = weight_grad.item
        rank.time_ms += item.busy_ms * rank.factors.get(item.key, 1.0) + item.blocked_ms * self._blocked_share
        rank.num_weight_grads += 1

    def _pass(self, rank: _Rank, arrived_ms: float) -> None:
        if arrived_ms > rank.time_ms:
            rank.exposed_ms += arrived_ms - rank.time_ms
            rank.time_ms = arrived_ms

    def _arrival_ms(self, place: int, key: Key) -> float:
        of_ranks = self._arrived.get(key)
        return NEVER if of_ranks is None else of_ranks[place]

    def _launch_or_hold(self, place: int, key: Key, needs: Key | None, now_ms: float) -> None:
        if needs is None or Cause.COUNTS in self._removed:
            self._launch(place, key, now_ms)
            return
        known_ms = self._arrival_ms(place, needs)
        if known_ms == NEVER:
            self._needed.setdefault(needs, []).append((place, key, now_ms))
        elif known_ms <= now_ms:
            self._launch(place, key, now_ms)
        else:
            self._at(known_ms, (place, key))

    def _launch(self, place: int, key: Key, now_ms: float) -> None:
        if not self._step.is_payload(key):
            self._launch_counts(place, key, now_ms)
            return
        message = self._messages.get(key)
        if message is None:
            links = self._inside if self._step.is_inside_node(key) else self._links
            message = self._messages[key] = self._step.message(key, links, self._removed)
            self._key_of[id(message)] = key
        message.issued_ms[place] = message.sent_ms[place] = now_ms
        message.num_ready += 1
        if message.num_ready == len(self._ranks):
            message.ready_ms = now_ms
            self._sending = message.links
            message.links.send(message, self)

    def _launch_counts(self, place: int, key: Key, now_ms: float) -> None:
        launched = self._counts.setdefault(key, [NEVER] * len(self._ranks))
        launched[place] = now_ms
        if Cause.COUNTS in self._removed:
            self._arrived.setdefault(key, [NEVER] * len(self._ranks))[place] = now_ms
            self._awake(key, [place])
        elif NEVER not in launched:
            arrived_ms = max(launched) + self._step.counts_ms(key, self._removed)
            self._arrived[key] = [arrived_ms] * len(self._ranks)
            self._awake(key, range(len(self._ranks)))

    def _awake(self, key: Key, places: Iterable[int]) -> None:
        """The arrival of a message is known at some ranks."""
        for place in places:
            rank = self._ranks[place]
            if rank.waits_for == key:
                rank.waits_for = None
                self._pass(rank, self._arrived[key][place])
                self._at(rank.time_ms, place)
        for place, dispatch, issued_ms in self._needed.pop(key, ()):
            self._at(max(issued_ms, self._arrived[key][place]), (place, dispatch))

    def call_at(self, time_ms: float, event: LinkEvent) -> None:
        """See :class:`~megatron_lancet.planning.simulation.links.Clock`, as for the other two."""
        self._at(time_ms, (self._sending, event))

    def arrive(self, message: Message, columns: Iterable[int]) -> None:
        """Ranks that wait for it go on when it is there."""
        key = self._key_of[id(message)]
        arrived_ms = self._arrived.setdefault(key, [NEVER] * len(self._ranks))
        beyond_ms = self._step.beyond_link(key, self._removed)
        for column in columns:
            arrived_ms[column] = max(message.ready_ms, message.arrival_ms[column] + beyond_ms)
        self._awake(key, columns)

    def reduce(self, reduction: Reduction, launched_ms: Sequence[float], end_ms: float) -> None:
        """Reductions are not replayed."""
        raise AssertionError(f"{reduction.name} was never launched")
