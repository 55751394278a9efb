"""Stands in for an interpreter: a fork of a process that has imported torch and Megatron does the work.

``python.py -m MODULE ARGUMENTS...``, with a module of :data:`MODULES`, or ``python.py [-u] SCRIPT ARGUMENTS...``, with
the environment, output, signals and status that the interpreter itself would have. $PRELOADED names the socket of the
process that forks. With $SLURM_STAND_IN this process and its fork write their ids to the file
$SLURM_STAND_IN/node<SLURM_NODEID>.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

REPO = Path(__file__).parents[3]
sys.path.insert(0, str(REPO))

from tests.ranks.preloaded import fork  # noqa: E402 it is found only now

MODULES = {"torch.distributed.run": "torchrun.py", "benchmarks.demo.rank": "demo_rank.py"}
"""Scripts of this folder that run them."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main() -> None:
    words = sys.argv[1:]
    if words[0] == "-u":  # as torchrun starts a rank; no fork keeps its output back
        del words[0]
    command = [str(Path(__file__).with_name(MODULES[words[1]])), *words[2:]] if words[0] == "-m" else words
    output = Path(f"/proc/{os.getpid()}/fd/1")
    environment = {**os.environ, "PYTHONPATH": str(REPO), "STAND_IN": str(os.getpid())}
    rank = fork(Path(os.environ["PRELOADED"]), command, environment, output, Path.cwd())

    def forward(number: int, _: FrameType | None) -> None:
        os.kill(rank.pid, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    if "SLURM_STAND_IN" in os.environ:
        node = Path(os.environ["SLURM_STAND_IN"]) / f"node{os.environ['SLURM_NODEID']}"
        with node.open("a") as processes:
            processes.write(f"{os.getpid()} {rank.pid}\n")
    status = rank.wait()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
