"""Every boundary between two ops of a step, as a place where a fault may strike.

A boundary has a label, such as ``waiting for L1.c0.F.dispatch#2``: what happens there, and the how manieth time in the
step, that is in which micro-batch:

    launched, waiting for, past    a message was launched, is waited for, has arrived
    end                            a compute op has ended, of the forward or of the backward
    dW                             a deferred weight gradient is about to run
    data, loss                     the forward reads its data, or has computed its loss
    report                         DDP is told that a gradient of the micro-batch is complete
"""

import os
import signal
import time
from collections import Counter
from contextlib import ExitStack

from megatron_lancet.patching import around

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB (injected)"
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
}
KINDS = ("exception", *SIGNALS)


class Boundaries:
    """Notes the boundaries that this rank passes, and strikes at one of them.

    Attributes:
        passed: labels, in order.
    """

    def __init__(self, kind: str = "", place: str = "") -> None:
        """
        Args:
            kind: what happens at ``place``, one of :data:`KINDS`; nothing does if it is empty.
            place: label of a boundary.
        """
        self.passed: list[str] = []
        self._kind, self._place = kind, place
        self._counts: Counter[str] = Counter()

    def begin_step(self, kind: str = "", place: str = "") -> None:
        """Counts from the beginning again; what may strike next is given anew."""
        self._kind, self._place = kind, place
        self._counts.clear()
        self.passed.clear()

    def at(self, what: str) -> None:
        """This rank is at a boundary."""
        self._counts[what] += 1
        label = f"{what}#{self._counts[what]}"
        self.passed.append(label)
        if self._kind and label == self._place:
            strike(self._kind)

    def watch(self, stack: ExitStack) -> None:
        """Inside the context every boundary is noted. Ops report their ends to a trace only: one has to be recorded."""
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

        from megatron_lancet.runtime.comm import Comm
        from megatron_lancet.runtime.trace import Trace

        stack.enter_context(around(Comm, "mark", self._mark))
        stack.enter_context(around(Trace, "end", self._end))
        stack.enter_context(around(Trace, "weight_grad", self._weight_grad))
        stack.enter_context(around(_ParamAndGradBucketGroup, "register_grad_ready", self._report))

    def _mark(self, mark, comm, doing, op):
        mark(comm, doing, op)
        # Counts are waited for only if they are late.
        if (doing, str(op.kind)) != ("waiting for", "counts"):
            self.at(f"{doing} {op}")

    def _end(self, end, trace, name):
        end(trace, name)
        self.at(f"end {name}")

    def _weight_grad(self, weight_grad, trace, name, *args):
        self.at(f"dW {name}")
        return weight_grad(trace, name, *args)

    def _report(self, register, *args, **kwargs):
        self.at("report")
        return register(*args, **kwargs)


def strike(kind: str) -> None:
    """Makes the fault happen here."""
    if kind == "exception":
        raise RuntimeError(OUT_OF_MEMORY)
    os.kill(os.getpid(), SIGNALS[kind])
    time.sleep(60)  # a thread reads signals that have a handler, and ends the process
