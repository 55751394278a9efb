"""Simulates an order of ops on several ranks with lanes for compute and link each (Lancet section 5.3, all ranks).

Messages inside a node have links of their own, so of two hops one message of each may be on the way at a time. A
message is sent when all ranks of the group can, also one that does not go to all of them.

Events are handled in the order of simulated time, so the links (``links.py``) get messages in the order in which they
are sent. Compute during a rank's messages is slower by ``compute_slowdown``, and ops that mostly move rows by
``memory_slowdown``. Where the host polls (CPU), copying bytes is what costs time, so that holds while they move: not
before all ranks have issued the message. Elsewhere (CUDA) the kernels of a message occupy the device from its issue
on. Token counts take no bandwidth.

A dispatch leaves when its counts have arrived. Where the host polls (CPU), that needs nothing of the rank, which goes
on computing. Elsewhere (CUDA) the host may stop for them (``rank_state.py``).
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron_lancet.planning.simulation.buckets import Buckets, Ledger, Reduction
from megatron_lancet.planning.simulation.cost_model import DwCost
from megatron_lancet.planning.simulation.links import NEVER, LaunchReduction, LinkEvent, Links, Message
from megatron_lancet.planning.simulation.lowering import (
    BESIDE,
    IN_PASS,
    Action,
    EndBackward,
    Step,
    counts_key,
    key_of,
    layer_at,
)
from megatron_lancet.planning.simulation.phase_result import PhaseResult
from megatron_lancet.planning.simulation.rank_state import (
    CountsState,
    LayerDw,
    RankState,
    launched_after_ms,
    new_message,
    phase_result,
)
from megatron_lancet.schedule.dw_queue import DwQueue, DwRules
from megatron_lancet.schedule.ops import INSIDE_NODE, MEMORY_BOUND, Op, OpKind, Phase, Verb
from megatron_lancet.schedule.timeline import Lane, Span
from megatron_lancet.schedule.turns import Compute, Launch, LaunchCounts, Wait

Paces = Sequence[Mapping[int, float]]
"""Factors of compute time by column and layer; 1 for other layers. A paired forward has layer + BESIDE."""


class _Resume(NamedTuple):
    """Event: a rank continues."""

    rank: RankState


class _Ready(NamedTuple):
    """Event: a rank has the size of its part of a message."""

    rank: RankState
    message: Message


_Event = _Resume | _Ready | LinkEvent


class Engine:
    """Simulates one phase, forward or backward, of one micro-batch; or backwards paired with forwards.

    Steps of a forward during a backward are recognised by their place (:data:`BESIDE`). Deferred dWs of the backward
    run in waits of both, but the backward's window of deferral counts: waits of the forward do not advance it. Where
    the host does not see when a message arrives, only those run in front of a forward's wait that are planned for it.
    """

    def __init__(
        self,
        links: Links,
        inside_node: Links,
        steps: Sequence[Step],
        phase: Phase,
        rules: DwRules,
        record: bool,
        paces: Paces = (),
        buckets: Buckets | None = None,
        later_rules: Sequence[DwRules] = (),
        keeps_one_order: bool = False,
    ) -> None:
        """
        Args:
            links: new links, of the shared kind if there are ``buckets``.
            inside_node: new links of messages inside a node, not of the shared kind.
            rules: rules of the dWs of the backward, of the first one if there are several.
            record: whether to record spans and waits.
            paces: factors of compute time; empty for none.
            buckets: gradients that are reduced during a backward pass; None for none.
            later_rules: rules of the other backwards, in order.
            keeps_one_order: whether a host that polls also stops in front of a message until earlier dispatches have
                been sent (``runtime/comm.py``).
        """
        self._links = links
        self._inside_node = inside_node
        self._free_ms, self._inside_free_ms = links.free_ms, inside_node.free_ms
        self._counts_ms = links.network.counts_ms
        self._slowdown = links.network.compute_slowdown
        self._polls = links.network.host_polls
        self._keeps_order = keeps_one_order or not self._polls
        self._paces = paces
        self._steps = steps
        self._is_forward = phase is Phase.FORWARD
        self._phase = phase
        self._rules = (rules, *later_rules)
        self._has_gaps = any(one.gaps for one in self._rules)
        self._record = record
        self._buckets = buckets
        self._memory_slowdown = links.network.memory_slowdown
        self._is_slowed = max(self._slowdown, self._memory_slowdown) > 1
        self._has_host = any(action.forward_host_ms + action.backward_host_ms for _, _, action in steps)
        self._events: list[tuple[float, int, _Event]] = []
        self._num_events = 0
        self._messages: dict[int, Message] = {}
        self._counts: dict[int, CountsState] = defaultdict(CountsState)
        self._ranks: list[RankState] = []
        self._reduced_ms = 0.0

    def run(self, start_ms: Sequence[float]) -> PhaseResult:
        """Simulates the phase from each rank's clock on."""
        for column, clock_ms in enumerate(start_ms):
            rank = RankState(column, clock_ms, DwQueue(self._rules[0]))
            if self._buckets is not None:
                rank.ledger = Ledger(self._buckets, rank.queue)
            self._ranks.append(rank)
            self.call_at(rank.time_ms, _Resume(rank))
        events = self._events
        while events:
            time_ms, _, event = heapq.heappop(events)
            if isinstance(event, _Resume):
                self._resume(event.rank)
            elif isinstance(event, _Ready):
                self._send(event.rank, event.message, time_ms)
            else:
                self._links.advance(time_ms, event, self)
        assert all(rank.index == len(self._steps) for rank in self._ranks), (
            "a rank waits for a message that is not sent"
        )
        return phase_result(self._ranks, self._reduced_ms)

    def call_at(self, time_ms: float, event: _Event) -> None:
        """Schedules ``event``, after others of the same time."""
        self._num_events += 1
        heapq.heappush(self._events, (time_ms, self._num_events, event))

    def _resume(self, rank: RankState) -> None:
        """Runs a rank until it must wait or another event is earlier."""
        steps, events, is_forward = self._steps, self._events, self._is_forward
        is_plain = not self._is_slowed and not self._record and not self._has_host
        column, num_steps, paces = rank.column, len(steps), self._paces
        while rank.index < num_steps:
            verb, place, action = steps[rank.index]
            if verb is Compute:
                # The simulator spends most of its time in these lines.
                runs_forward = is_forward or place & BESIDE
                ms = action.forward_ms[column] if runs_forward else action.backward_ms[column]
                if paces:
                    ms *= paces[column].get(place & IN_PASS, 1.0)
                if is_plain:
                    rank.time_ms += ms
                else:
                    slowdown = self._memory_slowdown if action.kind in MEMORY_BOUND else self._slowdown
                    rank.host_ms += action.forward_host_ms if runs_forward else action.backward_host_ms
                    name = self._name(place, action.chunk, action.kind, action.tile) if self._record else ""
                    self._compute(rank, name, ms, slowdown)
                if not runs_forward and action.weight_grads[column]:
                    self._put_all(rank, layer_at(place), action.weight_grads[column])
                rank.index += 1
                continue
            if verb is EndBackward:
                self._end_backward(rank)
                rank.index += 1
                continue
            if events and events[0][0] < rank.time_ms:
                self.call_at(rank.time_ms, _Resume(rank))
                return
            key = key_of(place, action)
            if rank.pending is not None and not self._launch_pending(rank, verb, key, action):
                return
            if verb is Launch:
                self._issue(rank, key, place, action)
            elif verb is LaunchCounts:
                self._issue_counts(rank, key)
            elif not self._wait(rank, self._messages[key]):
                return
            rank.index += 1
        self._end(rank)

    def _name(self, place: int, chunk: int, kind: str, tile: int | None = None) -> str:
        phase, layer = Phase.FORWARD if place & BESIDE else self._phase, layer_at(place)
        return str(Op(layer, chunk, phase, kind, tile) if layer else Op.beside_layers(phase, kind))

    def _name_of(self, message: Message) -> str:
        return self._name(message.place, message.chunk, message.kind, message.tile)

    def _compute(self, rank: RankState, name: str, ms: float, slowdown: float) -> None:
        """Runs a compute op."""
        if slowdown > 1 and rank.num_unknown and not self._polls:
            ms, slowdown = ms * slowdown, 1.0
        rank.compute(name if self._record else "", ms, slowdown, self._busy_until_ms(rank.column))

    def _busy_until_ms(self, column: int) -> float:
        """When a rank's links will all be idle if no more is sent."""
        return max(self._free_ms[column], self._inside_free_ms[column])

    def _put_all(self, rank: RankState, layer: int, costs: Iterable[DwCost]) -> None:
        """Puts the dWs that became ready with a compute op."""
        for cost in costs:
            for dw in rank.queue.put(LayerDw(layer - cost.layers_back, cost), cost.pinned_bytes):
                self._run_dw(rank, dw)
        if rank.ledger is not None:
            for cost in costs:
                self._launch(rank, rank.ledger.put((layer - cost.layers_back, cost.name)))

    def _run_dw(self, rank: RankState, dw: LayerDw) -> None:
        ms = dw.cost.ms
        if self._paces:
            ms *= self._paces[rank.column].get(dw.layer, 1.0)
        if self._record or self._slowdown > 1 or self._has_host:
            rank.host_ms += dw.cost.host_ms
            self._compute(rank, dw.name, ms, self._slowdown)
        else:
            rank.time_ms += ms

    def _end_backward(self, rank: RankState) -> None:
        """Ends a backward that is followed by another; its forward goes on."""
        for dw in rank.queue.flush():
            self._run_dw(rank, dw)
        rank.end_backward(self._rules)

    def _end(self, rank: RankState) -> None:
        """Runs the rank's remaining dWs and launches the remaining reductions."""
        for dw in rank.queue.flush():
            self._run_dw(rank, dw)
        if rank.ledger is not None:
            self._launch(rank, rank.ledger.end())

    def _launch(self, rank: RankState, reductions: Iterable[Reduction]) -> None:
        for reduction in reductions:
            self.call_at(rank.time_ms, LaunchReduction(rank.column, reduction))

    def reduce(self, reduction: Reduction, launched_ms: Sequence[float], end_ms: float) -> None:
        """Records a reduction that has ended on all ranks; called by the links."""
        self._reduced_ms = max(self._reduced_ms, end_ms)
        if self._record:
            for rank in self._ranks:
                start_ms = launched_ms[rank.column]
                rank.spans.append(Span(reduction.name, Lane.COMM, start_ms, end_ms, reduction.num_bytes))

    def _issue_counts(self, rank: RankState, key: int) -> None:
        counts = self._counts[key]
        counts.issued_ms[rank.column] = rank.time_ms
        if len(counts.issued_ms) == len(self._ranks):
            counts.done_ms = rank.time_ms + self._counts_ms
            for waiting, message, launched_ms in counts.waiting:
                self.call_at(max(counts.done_ms, launched_ms), _Ready(waiting, message))
            for stopped in counts.stopped:
                self.call_at(max(stopped.time_ms, counts.done_ms), _Resume(stopped))

    def _launch_pending(self, rank: RankState, verb: type[Verb], key: int, action: Action) -> bool:
        """Stops the host at a step in front of which the pending dispatch is launched, until its counts are known.

        A host that polls keeps the order of the messages of one wire.

        Returns:
            False if the rank must be resumed later.
        """
        assert rank.pending is not None
        message, its_counts = self._messages[rank.pending], counts_key(rank.pending)
        counts, is_with_it = self._counts[its_counts], counts_key(key) == its_counts
        if self._polls:
            goes_on = (
                verb is not Launch or counts_key(key) in self._counts or self._links_of(action) is not message.links
            )
        else:
            goes_on = is_with_it if verb is Launch else verb is Wait and not is_with_it
        if goes_on:
            return True
        if counts.done_ms == NEVER:
            counts.stopped.append(rank)
            return False
        rank.pending = None
        idle_from_ms = rank.time_ms
        rank.get_counts(counts.done_ms, self._links.network.launch_ms)
        if counts.done_ms <= idle_from_ms:
            return True
        name = self._name(message.place, message.chunk, OpKind.COUNTS) if self._record else ""
        rank.end_wait_for_counts(counts, idle_from_ms, name)
        self.call_at(rank.time_ms, _Resume(rank))
        return False

    def _issue(self, rank: RankState, key: int, place: int, action: Action) -> None:
        """Sends a rank's part of a message now, or when its counts have arrived."""
        message = self._messages.get(key)
        if message is None:
            is_forward = self._is_forward or bool(place & BESIDE)
            message = self._messages[key] = new_message(self._links_of(action), place, action, is_forward)
        message.issued_ms[rank.column] = rank.time_ms
        rank.num_unknown += 1
        if rank.ledger is not None:
            rank.ledger.issue()
        counts = self._counts.get(counts_key(key))
        if counts is not None and self._keeps_order:
            rank.pending = key
        launched_ms = rank.time_ms
        if rank.pending is not None and self._has_host:
            launched_ms = max(launched_ms, launched_after_ms(rank, self._steps, self._is_forward))
        if counts is None or max(counts.done_ms, launched_ms) <= rank.time_ms:
            self._send(rank, message, rank.time_ms)
        elif counts.done_ms == NEVER:
            counts.waiting.append((rank, message, launched_ms))
        else:
            self.call_at(max(counts.done_ms, launched_ms), _Ready(rank, message))

    def _links_of(self, action: Action) -> Links:
        """The links of a message."""
        return self._inside_node if action.kind in INSIDE_NODE else self._links

    def _send(self, rank: RankState, message: Message, time_ms: float) -> None:
        """Notes that a rank's part can be sent; the message is sent when all parts can."""
        message.num_ready += 1
        if time_ms > message.ready_ms:
            message.ready_ms = time_ms
        message.sent_ms[rank.column] = max(time_ms, message.links.free_ms[rank.column])
        if message.num_ready == len(self._ranks):
            message.links.send(message, self)

    def arrive(self, message: Message, columns: Iterable[int]) -> None:
        """Resumes ranks when the arrival of ``message`` is known; called by the links."""
        ranks = self._ranks
        for column in columns:
            ranks[column].num_unknown -= 1
            if self._slowdown > 1 and self._polls:
                ranks[column].slow_past_compute(message, self._slowdown, self._record)
        if message.waiting:
            for column in [column for column in message.waiting if message.arrival_ms[column] < NEVER]:
                message.waiting.remove(column)
                rank = ranks[column]
                self.call_at(max(rank.time_ms, message.arrival_ms[column]), _Resume(rank))
        if self._record:
            name = self._name_of(message)
            for column in columns:
                start_ms, end_ms = message.issued_ms[column], message.arrival_ms[column]
                ranks[column].spans.append(Span(name, Lane.COMM, start_ms, end_ms, message.num_bytes[column]))

    def _wait(self, rank: RankState, message: Message) -> bool:
        """Runs dWs until the message has arrived; returns False if the rank must be resumed later."""
        if self._links.next_ms <= rank.time_ms:
            self.call_at(rank.time_ms, _Resume(rank))  # an arrival at this time precedes the wait
            return False
        column = rank.column
        if rank.wait_start_ms < 0:
            rank.wait_start_ms = rank.time_ms
            if self._has_gaps:
                rank.queue.begin_gap(self._name_of(message))
            if not self._polls:
                self._run_ahead(rank, message)
        while self._polls and message.arrival_ms[column] > rank.time_ms:
            dw = rank.queue.take_next()
            if dw is None:
                break
            self._fill(rank, dw)
            is_known = message.arrival_ms[column] < NEVER
            if not is_known and self._events and self._events[0][0] < rank.time_ms:
                self.call_at(rank.time_ms, _Resume(rank))
                return False
        if message.arrival_ms[column] == NEVER:
            message.waiting.append(column)
            return False
        self._received(rank, message)
        return True

    def _run_ahead(self, rank: RankState, message: Message) -> None:
        """Runs the dWs in front of a wait that the host enqueues without seeing when the message arrives."""
        take = rank.queue.take_planned if message.is_forward else rank.queue.take_ahead
        while (dw := take()) is not None:
            self._fill(rank, dw)

    def _fill(self, rank: RankState, dw: LayerDw) -> None:
        self._run_dw(rank, dw)
        if self._record:
            rank.filled.append(dw.name)

    def _received(self, rank: RankState, message: Message) -> None:
        rank.receive(message, self._name_of(message) if self._record else "")
        if not message.is_forward:
            for dw in rank.queue.advance_window():
                self._run_dw(rank, dw)
            if rank.ledger is not None:
                self._launch(rank, rank.ledger.advance(message.kind))
