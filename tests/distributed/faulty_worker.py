"""pretrain_gpt_moe.py in which one rank meets a fault in the middle of the second step.

LANCET_TEST_FAULT is FAULT@OP, LANCET_TEST_FAULTY_RANK the rank; LANCET_TEST_TIMEOUT_S, if set, is how long the
model's all-to-alls wait. The fault strikes when the rank is about to issue the op (nan: from the second step on):

    kill    the process is gone
    stop    the process stands still
    hold    it creates the file LANCET_TEST_GO.wanted and waits for LANCET_TEST_GO
    nan     its activations become NaN

With hold, the other ranks keep in LANCET_TEST_GO.stands where they stand.
"""

import faulthandler
import functools
import os
import signal
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from megatron_lancet.patching import wrapped
from megatron_lancet.training.pretrain import main

FAULTY_STEP = 2


class Fault:
    """What happens, where and when."""

    def __init__(self, text: str) -> None:
        self.kind, _, self.op = text.partition("@")
        self.step = 0

    def counting_steps(self, stock):
        @functools.wraps(stock)
        def train_step(*args, **kwargs):
            self.step += 1
            return stock(*args, **kwargs)

        return train_step

    def before_issue(self, issue):
        def start(comm, op, *args):
            if self.step == FAULTY_STEP and str(op) == self.op:
                self.strike()
            return issue(comm, op, *args)

        return start

    def strike(self) -> None:
        if self.kind == "hold":
            Path(os.environ["LANCET_TEST_GO"] + ".wanted").touch()
            while not Path(os.environ["LANCET_TEST_GO"]).exists():
                time.sleep(0.05)
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.kind])

    def spoiling(self, embed):
        def forward(*args, **kwargs):
            hidden = embed(*args, **kwargs)
            return hidden * float("nan") if self.step >= FAULTY_STEP else hidden

        return forward


def install(fault: Fault, stack: ExitStack) -> None:
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.training import training

    from megatron_lancet.runtime.comm import Comm

    stack.enter_context(wrapped(training, "train_step", fault.counting_steps))
    if fault.kind == "nan":
        stack.enter_context(wrapped(LanguageModelEmbedding, "forward", fault.spoiling))
    else:
        for issue in ("start", "start_after", "start_counts"):
            stack.enter_context(wrapped(Comm, issue, fault.before_issue))


def noting_position(stands):
    path = Path(os.environ["LANCET_TEST_GO"] + ".stands")

    @functools.wraps(stands)
    def noted(comm, doing, op):
        stands(comm, doing, op)
        path.write_text(f"{doing} {op}")

    return noted


def note_position(stack: ExitStack) -> None:
    from megatron_lancet.runtime.comm import Comm

    stack.enter_context(wrapped(Comm, "stands", noting_position))


def with_timeout(timeout_s: float, stack: ExitStack) -> None:
    from megatron_lancet.training.overlap_setup import OverlapSetup

    def wrap(init):
        def short(self, plan, device, stats, timeout, *args):
            init(self, plan, device, stats, timedelta(seconds=timeout_s), *args)

        return short

    stack.enter_context(wrapped(OverlapSetup, "__init__", wrap))


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with ExitStack() as stack:
        if os.environ["RANK"] == os.environ["LANCET_TEST_FAULTY_RANK"]:
            install(Fault(os.environ["LANCET_TEST_FAULT"]), stack)
        elif os.environ["LANCET_TEST_FAULT"].startswith("hold"):
            note_position(stack)
        if "LANCET_TEST_TIMEOUT_S" in os.environ:
            with_timeout(float(os.environ["LANCET_TEST_TIMEOUT_S"]), stack)
        main()
