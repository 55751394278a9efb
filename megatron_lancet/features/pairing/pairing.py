"""Pairs the backward of a micro-batch with the forward of the next, in the turns of ``schedule/pairing.py``."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from megatron_lancet.errors import UsageError
from megatron_lancet.features.pairing.core import SharedCore
from megatron_lancet.features.pairing.lane import Forward, ForwardLane
from megatron_lancet.patching import replaced
from megatron_lancet.runtime.position import Position
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.pairing import PairedTurns
from megatron_lancet.schedule.plan import Plan

ASKED_BY = "overlap_moe_expert_parallel_comm"
"""Field of Megatron's configuration of a model that selects its schedules for pairs. Our layers do not read it."""
NUM_FREE_STEPS = 2
"""First steps of a plan, in which its threads are kept on no core."""


@dataclass
class MicroBatch:
    """A micro-batch of a step in which backwards are paired with forwards.

    Attributes:
        number: its number in the step, from 1; with virtual pipeline stages the number of its stage's forward.
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
    """A backward and what may be paired with it.

    Attributes:
        beside: the micro-batch of the forward.
        following: the next one, whose turn 0 may run too; None if there is none.
        place: the place of the backward, see :class:`PairedTurns`.
    """

    turns: PairedTurns
    beside: MicroBatch
    following: MicroBatch | None
    place: int = 0


@dataclass
class _Side:
    """How far the forwards or the backwards of this rank are.

    Attributes:
        what: forward or backward.
        number: the micro-batch under way; None where there is none, or none is known.
        last: what was last done with an op; None before the first.
        last_number: the micro-batch of ``last``.
    """

    what: str
    number: int | None = None
    last: tuple[str, Op] | None = None
    last_number: int | None = None

    def begin(self, number: int) -> None:
        self.number, self.last = number, None

    def description(self, description: Callable[[str, Op], str]) -> str:
        if self.last is None:
            whose = "" if self.number is None else f" of the {self.what} of micro-batch {self.number}"
            return f"before the first all-to-all{whose}"
        return description(*self.last) + ("" if self.last_number is None else f", of micro-batch {self.last_number}")


class Pairing(Position):
    """The forwards and the backwards of a step, as far as they run side by side, and how far both are.

    Attributes:
        lane: the thread of the forwards.
        trace: trace of the current step, None while nothing is recorded.
        is_at_end: whether the present forward is of a micro-batch at an end of the step.
    """

    def __init__(self, store: WeightGradStore | None, on_cuda: bool) -> None:
        super().__init__(store, on_cuda)
        self.lane = ForwardLane(on_cuda)
        self._core = SharedCore()
        self._num_free_steps = NUM_FREE_STEPS
        self._forwards, self._backwards = _Side("forward"), _Side("backward")
        self._present = self._backwards
        self._failed_at: tuple[_Side, _Side] | None = None
        self._pair: _Pair | None = None

    @property
    def is_on(self) -> bool:
        """Whether forwards and backwards of a step are under way on two threads."""
        return self._pair is not None or not self.lane.is_idle

    @classmethod
    @contextmanager
    def steps(cls, stages: Callable[[], Sequence[Any]]) -> Iterator[None]:
        """Inside the context steps by a plan with pairing run in pairs; after it the configurations are as before.

        The field of a model that is built inside is False then: a run whose user sets it has no plan.
        """
        # Planning tools and the virtual GPU read this file without Megatron's schedules.
        from megatron_lancet.features.pairing.schedules import paired_schedules

        asked = [id(stage.config) for stage in stages() if getattr(stage.config, ASKED_BY)]
        try:
            with paired_schedules(stages):
                yield
        finally:
            for stage in stages():
                setattr(stage.config, ASKED_BY, id(stage.config) in asked)

    @classmethod
    def on_threads(cls, context: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
        """Inside, the thread of each forward runs it inside a context of its own."""
        return replaced(ForwardLane, "on_thread", context)

    def run_by(self, stages: Sequence[Any], plan: Plan) -> None:
        """Makes Megatron run the next steps by the schedules for pairs, or by the schedules without them.

        Megatron validates the field when it makes the configuration; its conditions belong to its own overlap.
        """
        self._num_free_steps = NUM_FREE_STEPS
        for stage in stages:
            setattr(stage.config, ASKED_BY, plan.is_paired)

    def add(self, run: Callable[[], Any], number: int, at_end: bool, num_waits: int) -> MicroBatch:
        """Queues a micro-batch's forward.

        Args:
            num_waits: messages that it will wait for.
        """

        def run_forward() -> Any:
            self.is_at_end = at_end
            self._failed_at = None
            self._forwards.begin(number)
            result = run()
            self._forwards.number = None  # not if it has failed: the position names it
            return result

        return MicroBatch(number, at_end, num_waits, self.lane.add(run_forward))

    def finish(self, micro_batch: MicroBatch) -> Any:
        """Runs a micro-batch's forward to its end; returns what it returned, once.

        Raises:
            UsageError: the forward waited for more or fewer messages than one pass through the layers.
        """
        forward = micro_batch.forward
        while not forward.is_done:
            self._run_turn()
        if forward.num_turns != micro_batch.num_waits + 1:
            raise UsageError(
                "expected a forward step that runs the model once, in training mode, found another: a forward took "
                f"{forward.num_turns} turns, and {micro_batch.num_waits + 1} were planned. Set --lancet-pairing off."
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
        self._backwards.begin(ended.number)
        self._present = self._backwards
        if beside is not None:
            self._pair = _Pair(PairedTurns(beside.num_waits, ended.num_waits), beside, following)
            self._run_due(self._pair)
        yield
        self._pair = self._backwards.number = None  # not if it has failed, see :meth:`end`

    def begin_step(self) -> None:
        """Called at the first forward of each step in pairs."""
        self._num_free_steps -= 1

    def on_one_core(self, has_pair: bool) -> AbstractContextManager[None]:
        """Inside, the threads of pairs stay on one core, but in the first steps of a plan.

        Args:
            has_pair: whether there is a pair inside.
        """
        is_kept = has_pair and self._num_free_steps < 0
        return self._core.kept(*self.lane.native_ids) if is_kept else nullcontext()

    def backward_waits(self) -> None:
        """Called in front of each wait of a backward: lets the forward paired with it run its turns."""
        if self._pair is not None:
            self._pair.place += 1
            self._run_due(self._pair)

    @property
    def number(self) -> int | None:
        """The micro-batch whose forward or backward the caller runs; None outside of such steps."""
        return self._side.number

    def mark(self, doing: str, op: Op) -> None:
        """Sets the position of the forward or backward that the caller runs."""
        self._failed_at = None
        self._present = side = self._side
        side.last, side.last_number = (doing, op), side.number

    def position(self, description: Callable[[str, Op], str]) -> str:
        """Returns where this rank is: first the pass (forward or backward) that ran last, or that has failed.

        Args:
            description: says what was done with an op.
        """
        present, other = self._failed_at or self._present_and_other()
        beside = "" if other.number is None else f"; paired with {other.description(description)}"
        return present.description(description) + beside

    def _present_and_other(self) -> tuple[_Side, _Side]:
        """Returns the pass (forward or backward) that ran last, and the other."""
        sides = self._forwards, self._backwards
        return sides if self._present is self._forwards else sides[::-1]

    @property
    def _side(self) -> _Side:
        return self._forwards if self.lane.is_here else self._backwards

    def forward_waits(self) -> None:
        """Called in front of each wait of a forward: ends its turn if it runs during a backward."""
        self.lane.end_turn()

    def end(self) -> None:
        """Ends all forwards and drops deferred dWs, because the step has failed. Then another step can run."""
        failed = self._present_and_other()
        failed_at = replace(failed[0]), replace(failed[1])
        self._pair = None
        self.lane.end()
        self._forwards.number = self._backwards.number = None
        self._failed_at = failed_at  # until another step begins, the position is where this one has failed
        self.is_at_end = True
        if self._store is not None:
            self._store.abandon()

    def _run_due(self, pair: _Pair) -> None:
        num_due = pair.turns.done_by(pair.place)
        while pair.beside.forward.num_turns < num_due:
            self._run_turn()
        if pair.following is not None and pair.turns.begins_next(pair.place) and not pair.following.forward.num_turns:
            self._run_turn()

    def _run_turn(self) -> None:
        self._present = self._forwards
        self._core.keep(threading.get_native_id())  # on CUDA, backwards run on a thread of autograd
        with nullcontext() if self.trace is None else self.trace.forward_turn():
            self.lane.run_turn()
        if self._backwards.number is not None:
            self._present = self._backwards  # not if the forward has failed
