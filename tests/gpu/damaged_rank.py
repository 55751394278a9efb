"""A rank of the check with an error: damaged_rank.py DAMAGE, then the arguments of a rank. Rank 1 has the error."""

import os
import signal
import sys
import time
from contextlib import ExitStack

from benchmarks.gpu.check.rank import __main__ as rank

CASE = "ours k=2"
"""In which the error is."""


def damaged(damage: str, stack: ExitStack) -> None:
    from benchmarks.gpu.check.rank import gradients
    from benchmarks.gpu.variants import Runner
    from megatron_lancet.patching import around
    from megatron_lancet.runtime.comm import Comm

    present = []

    def run(stock, cases, case):
        present.append(case is gradients.CASES[CASE])
        return stock(cases, case)

    def step(stock, runner):
        stock(runner)
        if present[-1] and runner._plan is not None:
            next(iter(runner.gradients().values())).mul_(1.01)

    def transport_of(stock, comm, op):
        if present[-1] and damage == "hang":
            time.sleep(600)
        if present[-1] and damage == "crash":
            sys.stderr.write("about to crash\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if present[-1] and damage == "error":
            raise RuntimeError("no memory")
        return stock(comm, op)

    stack.enter_context(around(gradients.GradientCases, "run", run))
    if damage == "wrong gradient":
        stack.enter_context(around(Runner, "step", step))
    else:
        stack.enter_context(around(Comm, "transport_of", transport_of))


if __name__ == "__main__":
    with ExitStack() as stack:
        if os.environ["RANK"] == "1":
            damaged(sys.argv.pop(1), stack)
        else:
            del sys.argv[1]
        rank.main()
