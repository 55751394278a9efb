"""Starts the ranks of a run as forks of this process, which has imported Megatron already."""

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from megatron_lancet.errors import USAGE_EXIT_CODE, UsageError
from megatron_lancet.lab.check.worker import Task, run_task

_POLL_S = 0.02


class RefusedRunError(Exception):
    """Megatron, or our checks of its arguments, refuse the run; the text says why."""


class FailedRunError(Exception):
    """A rank failed or did not end; the text says which, and how its output ends."""


@dataclass
class _Rank:
    pid: int
    log: Path
    status: int | None = None


def run_ranks(task: Task, num_ranks: int, timeout_s: float) -> None:
    """Runs a task on forks of this process.

    Raises:
        RefusedRunError: the run is refused.
        FailedRunError: a rank failed, or still ran after ``timeout_s``.
    """
    torch.set_num_threads(1)  # forks must not wait for threads that they do not have
    task.folder.mkdir(parents=True, exist_ok=True)
    with held_port() as port:
        ranks = _start(task, num_ranks, port)
        hung = _wait(ranks, timeout_s)
    if any(rank.status != 0 for rank in ranks):
        _raise(ranks, [rank.log.read_text(errors="replace") for rank in ranks], hung, timeout_s)


@contextmanager
def held_port() -> Iterator[int]:
    """Yields a port for rank 0 that the system gives to no other process inside the context.

    A bound socket that does not listen holds the port. Linux lets a second socket listen on it if both may reuse
    addresses, as torch's store does.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _start(task: Task, num_ranks: int, port: int) -> list[_Rank]:
    sys.stdout.flush()
    sys.stderr.flush()
    ranks = []
    for rank in range(num_ranks):
        log = task.folder / f"rank{rank}.log"
        pid = os.fork()
        if pid == 0:
            _become_rank(task, rank, num_ranks, port, log)
        ranks.append(_Rank(pid, log))
    return ranks


def _become_rank(task: Task, rank: int, num_ranks: int, port: int, log: Path) -> NoReturn:
    """Runs the task in this process, a fork, and ends it."""
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        os.environ.update({name: str(rank) for name in names[0]} | {name: str(num_ranks) for name in names[1]})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        run_task(task)
        status = 0
    except UsageError as error:
        print(f"error: {error}", flush=True)  # noqa: T201
        status = USAGE_EXIT_CODE
    except BaseException:  # noqa: BLE001 a fork must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(ranks: list[_Rank], timeout_s: float) -> bool:
    """Waits for all ranks, and ends the others once one has failed; returns whether one was still running."""
    deadline_s = time.monotonic() + timeout_s
    try:
        while any(rank.status is None for rank in ranks):
            for rank in ranks:
                if rank.status is None:
                    ended, status = os.waitpid(rank.pid, os.WNOHANG)
                    rank.status = os.waitstatus_to_exitcode(status) if ended else None
            if any(rank.status for rank in ranks):
                return False
            if time.monotonic() > deadline_s:
                for rank in ranks:
                    if rank.status is None:
                        os.kill(rank.pid, signal.SIGUSR1)
                time.sleep(1.0)
                return True
            time.sleep(_POLL_S)
        return False
    finally:
        for rank in ranks:
            if rank.status is None:
                os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
                rank.status = -signal.SIGKILL


def _raise(ranks: list[_Rank], outputs: list[str], hung: bool, timeout_s: float) -> NoReturn:
    for rank, output in zip(ranks, outputs, strict=True):
        if rank.status == USAGE_EXIT_CODE:
            raise RefusedRunError(output.strip().splitlines()[-1].removeprefix("error: "))
    if hung:
        tails = "\n".join(f"--- rank {i}\n{output[-2000:]}" for i, output in enumerate(outputs))
        raise FailedRunError(f"ranks still ran after {timeout_s:g} s\n{tails}")
    # Those that were ended because of another rank say nothing of interest.
    first = next((i for i, rank in enumerate(ranks) if (rank.status or 0) > 0), 0)
    raise FailedRunError(f"rank {first} ended with status {ranks[first].status}\n{outputs[first][-4000:]}")
