"""The position of a rank whose forwards and backwards run one after the other."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron_lancet.runtime.recorder import Recorder
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.plan import Plan


class Position:
    """The last op of a rank. Another class of ``registry.py`` may also pair forwards with backwards.

    Attributes:
        trace: trace of the current step, None while nothing is recorded.
        is_at_end: whether the present forward is of a micro-batch at an end of a step with pairing.
    """

    def __init__(self, store: WeightGradStore | None, on_cuda: bool) -> None:
        """
        Args:
            store: holds the deferred dWs of the rank; None where none is deferred.
            on_cuda: whether compute runs on a CUDA stream.
        """
        self._store = store
        self._on_cuda = on_cuda
        self.trace: Recorder | None = None
        self.is_at_end = True
        self._last: tuple[str, Op] | None = None

    @property
    def is_on(self) -> bool:
        """Whether forwards and backwards of a step are under way on two threads."""
        return False

    @property
    def number(self) -> int | None:
        """The micro-batch whose forward or backward the caller runs; None where it is not known."""
        return None

    def mark(self, doing: str, op: Op) -> None:
        """Sets what was last done with an op."""
        self._last = doing, op

    def position(self, description: Callable[[str, Op], str]) -> str:
        """Returns where this rank is.

        Args:
            description: says what was done with an op.
        """
        return "before the first all-to-all" if self._last is None else description(*self._last)

    @classmethod
    def steps(cls, stages: Callable[[], Sequence[Any]]) -> AbstractContextManager[None]:
        """Inside the context Megatron's training steps run by the plans of ``stages``, this rank's pipeline stages."""
        return nullcontext()

    @classmethod
    def on_threads(cls, context: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
        """Inside, each thread that runs a part of a step runs it inside a context of its own."""
        return nullcontext()

    def run_by(self, stages: Sequence[Any], plan: Plan) -> None:
        """Runs steps by ``plan``, which the pipeline stages of this rank have, from the next one on."""

    def forward_waits(self) -> None:
        """Called in front of each wait of a forward."""

    def backward_waits(self) -> None:
        """Called in front of each wait of a backward."""
