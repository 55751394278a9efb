"""CPU time of parts of a step, each without the parts inside of it, on every thread that launches."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_lancet.features.pairing.lane import ForwardLane
from megatron_lancet.patching import around
from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.exchange import CountsExchange, Exchange
from megatron_lancet.runtime.trace import Trace
from megatron_lancet.runtime.weight_grad_store import DeferredWeight
from megatron_lancet.schedule.ops import Op, Phase

_WAIT = "wait for the device"
_LANE = "turns of the lane"
_REPORTS = "reports to DDP"
_WEIGHT_GRADS = "W"


class _Thread(threading.local):
    """Current activity of a thread.

    Attributes:
        inside_ns: for the thread, and each part under way on it, the time of the parts inside.
        parts: those under way.
        began_ns: when the outermost of them began.
        marked_ns: time of the last mark.
        ended: the op that ended there.
        step: the step that this belongs to.
    """

    def __init__(self) -> None:
        self.inside_ns = [0]
        self.parts: list[str] = []
        self.began_ns = 0
        self.marked_ns = 0
        self.ended = ""
        self.step = 0


class CpuTimes:
    """CPU times of ops, by name without layer and chunk.

    Attributes:
        of_layers: microseconds of each call, of ops that belong to layers.
        beside: the same of others.
        wait_us: CPU time in which the host waited for the device; in none of the others.
    """

    def __init__(self) -> None:
        self.of_layers: defaultdict[str, list[float]] = defaultdict(list)
        self.beside: defaultdict[str, list[float]] = defaultdict(list)
        self.wait_us = 0.0
        self._thread = _Thread()
        self._step = 0

    def begin_step(self) -> None:
        """Forgets what threads did since their last marks."""
        self._step += 1
        self.mark()

    def mark(self) -> float:
        """Returns the microseconds of this thread since its last mark in this step, without measured parts."""
        thread = self._thread
        # Inside of a part the mark is at its begin, so that all of the part lies behind it.
        now_ns = thread.began_ns if thread.parts else time.thread_time_ns()
        is_first = thread.step != self._step
        since_ns = 0 if is_first else now_ns - thread.marked_ns - thread.inside_ns[0]
        thread.step, thread.marked_ns, thread.inside_ns[0], thread.ended = self._step, now_ns, 0, ""
        return since_ns / 1e3

    def end(self, op: Op) -> None:
        """Marks the end of an op, which may end in several steps."""
        again = self._thread.ended == str(op)
        us = self.mark()
        self._thread.ended = str(op)
        calls = (self.of_layers if op.layer is not None else self.beside)[f"{op.phase}.{op.kind}"]
        if again:
            calls[-1] += us
        else:
            calls.append(us)

    @contextmanager
    def part(self, name: str, is_of_layer: bool = True) -> Iterator[None]:
        """Measures a part inside the context; a part of the same name inside of it is not another one."""
        thread = self._thread
        if thread.parts and thread.parts[-1] == name:
            yield
            return
        thread.inside_ns.append(0)
        start_ns = time.thread_time_ns()
        if not thread.parts:
            thread.began_ns = start_ns
        thread.parts.append(name)
        try:
            yield
        finally:
            all_ns = time.thread_time_ns() - start_ns
            own_us = (all_ns - thread.inside_ns.pop()) / 1e3
            thread.parts.pop()
            thread.inside_ns[-1] += all_ns
            if name == _WAIT:
                self.wait_us += own_us
            else:
                (self.of_layers if is_of_layer else self.beside)[name].append(own_us)


class HostTrace(Trace):
    """The product's trace with the CPU time of its threads for a clock. It records nothing but times of ops."""

    def __init__(self, times: CpuTimes) -> None:
        super().__init__(torch.device("cpu"), 0)
        self._times = times

    def skip(self) -> None:
        self._times.mark()

    def end(self, name: str) -> None:
        self._times.end(Op.parse(name))

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        yield  # measured separately

    @contextmanager
    def forward_turn(self) -> Iterator[None]:
        with self._times.part(_LANE):
            yield

    @contextmanager
    def weight_grad(self, name: str, pinned_bytes: int, weight_bytes: int) -> Iterator[None]:
        with self._times.part(_WEIGHT_GRADS, Op.parse(name).layer is not None):
            yield

    def sent(self, *_: Any, **__: Any) -> None: ...

    def received(self, *_: Any, **__: Any) -> None: ...

    def routed(self, *_: Any, **__: Any) -> None: ...


GROUPS = {
    "attention": ("attention", "norm", "mlp"),
    "router and counts": ("route", "counts"),
    "messages": ("launch", "send", "wait"),
    "rows": ("preprocess", "postprocess", "cut"),
    "experts": ("experts", "own_experts", "shared_experts"),
    "weight gradients": (_WEIGHT_GRADS,),
    "reports": (_REPORTS,),
    "lane": (_LANE,),
    "whole layer": ("layer",),
}
"""Groups of ops: the first or the last words of their names."""


def group_of(name: str) -> str:
    """The group in :data:`GROUPS` of an op's name."""
    words = name.partition(".")[2].split() or [name]
    for group, members in GROUPS.items():
        if name in members or words[-1] in members or words[0] in members:
            return group
    raise AssertionError(f"{name} is in no group")


@contextmanager
def measured_calls(times: CpuTimes) -> Iterator[None]:
    """Inside the context messages, reports to DDP, turns of the lane and waits of the host are parts of their own."""

    def under(name_of: Callable[..., tuple[str, bool]]) -> Callable[..., Any]:
        def call(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with times.part(*name_of(*args)):
                return stock(*args, **kwargs)

        return call

    def message(verb: str, phase: Phase | None = None) -> Callable[..., Any]:
        return under(lambda owner, *_: (f"{phase or owner.op.phase}.{verb} {owner.op.kind}", True))

    wait = under(lambda *_: (_WAIT, False))
    lane = under(lambda *_: (_LANE, True))
    calls: list[tuple[Any, str, Callable[..., Any]]] = [
        (AllToAll, "launch", message("launch")),
        (AllToAll, "wait", message("wait")),
        (AllToAll, "_launch_backward", message("launch", Phase.INPUT_GRAD)),
        (AllToAll, "_wait_backward", message("wait", Phase.INPUT_GRAD)),
        (Exchange, "launch", message("send")),
        (Comm, "launch_counts", under(lambda comm, op, *_: (f"{op.phase}.launch {op.kind}", True))),
        (CountsExchange, "wait", message("read")),
        (CountsExchange, "wait_for_own", message("read")),
        (DeferredWeight, "report", under(lambda weight: (_REPORTS, Op.parse(weight.name).layer is not None))),
        (ForwardLane, "end_turn", lane),
        (torch.cuda.Event, "synchronize", wait),
        (torch.cuda.Stream, "synchronize", wait),
        (torch.cuda, "synchronize", wait),
    ]
    with ExitStack() as stack:
        for owner, name, call in calls:
            stack.enter_context(around(owner, name, call))
        yield
