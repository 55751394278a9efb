"""pretrain_gpt_moe.py in which one rank meets a fault in the middle of the second step, or of LANCET_TEST_FAULTY_STEP.

LANCET_TEST_FAULT is FAULT@PLACE, LANCET_TEST_FAULTY_RANK the rank; LANCET_TEST_TIMEOUT_S, if set, is how long the
model's all-to-alls wait. The place is an op that the rank is about to issue, "data" where it is about to read its
next batch, or "save" where it is about to write its part of a checkpoint, after the second step (nan: from the second
step on):

    kill    the process is gone
    stop    the process stands still
    loop    it computes forever
    term    the process and its children get SIGTERM, as SLURM sends it
    int     it gets SIGINT, as from Ctrl-C
    error   it can't read its data
    full    the disk is full
    hold    it creates the file LANCET_TEST_GO.wanted and waits for LANCET_TEST_GO
    nan     its activations become NaN

With hold, the other ranks keep in LANCET_TEST_GO.stands where they stand.
"""

import os
import signal
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from unittest import mock

import psutil

from megatron_lancet.patching import around

FAULTY_STEP = int(os.environ.get("LANCET_TEST_FAULTY_STEP", "2"))


class Fault:
    """What happens, where and when."""

    def __init__(self, text: str) -> None:
        self.kind, _, self.place = text.partition("@")
        self.step = 0

    def counting_steps(self, stock, *args, **kwargs):
        self.step += 1
        return stock(*args, **kwargs)

    def before_issue(self, issue, comm, op, *args):
        if self.step == FAULTY_STEP and str(op) == self.place:
            self.strike()
        return issue(comm, op, *args)

    def before_data(self, read, *args):
        if self.step == FAULTY_STEP:
            self.strike()
        return read(*args)

    def open_part(self, path, mode):
        """In place of ``open``, where a rank writes its part of a checkpoint."""
        if self.step < FAULTY_STEP:
            return Path(path).open(mode)
        if self.kind == "full":
            return Path("/dev/full").open(mode)
        self.strike()
        raise AssertionError("the process should be gone")

    def strike(self) -> None:
        if self.kind == "term":
            for child in psutil.Process().children(recursive=True):
                child.terminate()
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.kind == "error":
            raise OSError("the data can't be read (injected)")
        elif self.kind == "int":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)  # a thread ends the process
        elif self.kind == "loop":
            while True:
                pass
        elif self.kind == "hold":
            Path(os.environ["LANCET_TEST_GO"] + ".wanted").touch()
            while not Path(os.environ["LANCET_TEST_GO"]).exists():
                time.sleep(0.05)
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.kind])

    def spoiling(self, embed, *args, **kwargs):
        hidden = embed(*args, **kwargs)
        return hidden * float("nan") if self.step >= FAULTY_STEP else hidden


def install(fault: Fault, stack: ExitStack) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.training import training

    from megatron_lancet.runtime.comm import Comm
    from megatron_lancet.training.megatron import gpt_data

    stack.enter_context(around(training, "train_step", fault.counting_steps))
    if fault.kind == "nan":
        stack.enter_context(around(LanguageModelEmbedding, "forward", fault.spoiling))
    elif fault.place == "data":
        stack.enter_context(around(gpt_data, "_next_batch", fault.before_data))
    elif fault.place == "save":
        stack.enter_context(mock.patch.object(filesystem_async, "open", fault.open_part, create=True))
    else:
        for issue in ("launch", "launch_when_known", "launch_counts"):
            stack.enter_context(around(Comm, issue, fault.before_issue))


def noting_position(mark, comm, doing, op):
    mark(comm, doing, op)
    Path(os.environ["LANCET_TEST_GO"] + ".stands").write_text(f"{doing} {op}")


def note_position(stack: ExitStack) -> None:
    from megatron_lancet.runtime.comm import Comm

    stack.enter_context(around(Comm, "mark", noting_position))


def with_timeout(timeout_s: float, stack: ExitStack) -> None:
    from megatron_lancet.training.overlap_setup import OverlapSetup

    def short(init, self, plan, device, stats, timeout, **kwargs):
        init(self, plan, device, stats, timedelta(seconds=timeout_s), **kwargs)

    stack.enter_context(around(OverlapSetup, "__init__", short))


if __name__ == "__main__":
    # Only here, as in pretrain_worker.py.
    from megatron_lancet.training.pretrain import main

    with ExitStack() as stack:
        if os.environ["RANK"] == os.environ["LANCET_TEST_FAULTY_RANK"]:
            install(Fault(os.environ["LANCET_TEST_FAULT"]), stack)
        elif os.environ["LANCET_TEST_FAULT"].startswith("hold"):
            note_position(stack)
        if "LANCET_TEST_TIMEOUT_S" in os.environ:
            with_timeout(float(os.environ["LANCET_TEST_TIMEOUT_S"]), stack)
        main()
