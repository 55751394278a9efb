"""Runs the backward of a micro-batch beside the forward of the next one, in the turns of ``schedule/pairing.py``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_lancet.runtime.lane import Forward, ForwardLane
from megatron_lancet.runtime.trace import Trace
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.pairing import PairedTurns


@dataclass
class MicroBatch:
    """A micro-batch of a step in which backwards run beside forwards.

    Attributes:
        number: its number in the step, from 1; with virtual pipeline stages that of its stage's forward.
        at_end: whether its forward or its backward has no partner.
        num_waits: messages that its forward waits for, and its backward.
        forward: its forward on the lane.
    """

    number: int
    at_end: bool
    num_waits: int
    forward: Forward


@dataclass
class _Pair:
    """A backward and what may run beside it.

    Attributes:
        beside: the micro-batch of the forward.
        following: the next one, whose turn 0 may run too; None if there is none.
        place: the place of the backward, see :class:`PairedTurns`.
    """

    turns: PairedTurns
    beside: MicroBatch
    following: MicroBatch | None
    place: int = 0


class Pairing:
    """The forwards and the backwards of a step, as far as they run side by side.

    Attributes:
        lane: the thread of the forwards.
        trace: trace of the current step, None while nothing is recorded.
        is_at_end: whether the present forward is of a micro-batch at an end of the step.
        forward_number: number of the micro-batch of the present forward; None outside of such steps.
        backward_number: the same for the backward.
    """

    def __init__(self, store: WeightGradStore | None, on_cuda: bool) -> None:
        self.lane = ForwardLane(on_cuda)
        self.trace: Trace | None = None
        self.is_at_end = True
        self.forward_number: int | None = None
        self.backward_number: int | None = None
        self._store = store
        self._pair: _Pair | None = None

    @property
    def is_on(self) -> bool:
        """Whether forwards and backwards of a step are under way on two threads."""
        return self._pair is not None or not self.lane.is_idle

    def add(self, run: Callable[[], Any], number: int, at_end: bool, num_waits: int) -> MicroBatch:
        """Queues a micro-batch's forward.

        Args:
            num_waits: messages that it will wait for.
        """

        def run_forward() -> Any:
            self.is_at_end, self.forward_number = at_end, number
            return run()

        return MicroBatch(number, at_end, num_waits, self.lane.add(run_forward))

    def finish(self, micro_batch: MicroBatch) -> Any:
        """Runs a micro-batch's forward to its end; returns what it returned, once."""
        forward = micro_batch.forward
        while not forward.is_done:
            self._run_turn()
        assert forward.num_turns == micro_batch.num_waits + 1, (
            f"a forward took {forward.num_turns} turns, and {micro_batch.num_waits + 1} were planned"
        )
        return forward.take_result()

    @contextmanager
    def backward(
        self, ended: MicroBatch, beside: MicroBatch | None = None, following: MicroBatch | None = None
    ) -> Iterator[None]:
        """Inside, the backward of ``ended`` runs, and lets the forward of ``beside`` take turns.

        Args:
            beside: a micro-batch that was added; None if the backward has no partner.
            following: the one after it, whose turn 0 runs as well; None if there is none.
        """
        assert self._pair is None
        if self._store is not None:
            self._store.begin_backward(ended.at_end)
        self.backward_number = ended.number
        if beside is not None:
            self._pair = _Pair(PairedTurns(beside.num_waits, ended.num_waits), beside, following)
            self._run_due(self._pair)
        try:
            yield
        finally:
            self._pair = self.backward_number = None

    def backward_waits(self) -> None:
        """Called in front of each wait of a backward: lets the forward beside it run its turns."""
        if self._pair is not None:
            self._pair.place += 1
            self._run_due(self._pair)

    def forward_waits(self) -> None:
        """Called in front of each wait of a forward: ends its turn if it runs beside a backward."""
        self.lane.end_turn()

    def end(self) -> None:
        """Ends all forwards, because the step has failed."""
        self._pair = self.backward_number = None
        self.lane.end()

    def _run_due(self, pair: _Pair) -> None:
        num_due = pair.turns.done_by(pair.place)
        while pair.beside.forward.num_turns < num_due:
            self._run_turn()
        if pair.following is not None and pair.turns.begins_next(pair.place) and not pair.following.forward.num_turns:
            self._run_turn()

    def _run_turn(self) -> None:
        trace = self.trace
        if trace is None:
            self.lane.run_turn()
            return
        with trace.forward_turn():
            self.lane.run_turn()
