"""Starts the ranks, ends all when one fails, and shows what it last said."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.namespaces import FREE, NUM_NODES, SHAPED, Namespaces, uninterrupted

_POLL_S = 0.1
_GRACE_S = 3.0
"""How long the other ranks may take to say what they saw of the failure."""
_TAIL_LINES = 25
_REPO = Path(__file__).parents[2]


class RankError(Exception):
    """A rank failed or took too long; the message has the end of what it printed."""


_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    # The thresholds don't hold for the arena that every further thread gets: its memory is given back as soon as 64 MB
    # of it are free, and is of no use to the main thread. Forwards of a plan with pairing run on a thread of their own.
    "MALLOC_ARENA_MAX": "1",
}
"""glibc then keeps freed memory for the next step, as torch's own allocator does on a GPU. By default it gives much of
it back, and a variant that holds memory longer takes more page faults."""


def rank_environment(rank: int, default_malloc: bool = False, ranks_per_node: int = 1) -> dict[str, str]:
    """Environment of a rank: torch.distributed meets on the free link, one thread computes.

    Args:
        default_malloc: the allocator keeps the settings of the caller's environment.
        ranks_per_node: ranks in each of the two namespaces.
    """
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "WORLD_SIZE": str(NUM_NODES * ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": Namespaces.address(FREE, 0),
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": FREE,
        "LANCET_SHAPED_IFNAME": SHAPED,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **({} if default_malloc else _KEEP_MEMORY),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(_REPO),
        "PYTHONUNBUFFERED": "1",
    }


def run_ranks(
    namespaces: Namespaces,
    module: str,
    args: Sequence[str],
    cores: Sequence[int],
    log_dir: Path,
    timeout_s: float,
    default_malloc: bool = False,
) -> None:
    """Run ``python -m module args`` once per rank, in its namespace and on one of the cores. Rank 0's output is shown.

    Args:
        cores: rank i runs on ``cores[i % len(cores)]``, so with more ranks than cores several share one.
        default_malloc: see :func:`rank_environment`.
        log_dir: gets each rank's stderr, and the output of all but rank 0.

    Raises:
        RankError: a rank failed, or they were not done after ``timeout_s``.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(namespaces.num_ranks):
            command = [sys.executable, "-m", module, *args, "--core", str(cores[rank % len(cores)])]
            with (log_dir / f"rank{rank}.err").open("wb") as errors, (log_dir / f"rank{rank}.out").open("wb") as out:
                ranks.append(
                    subprocess.Popen(
                        namespaces.command(rank, command),
                        env=rank_environment(rank, default_malloc, namespaces.ranks_per_node),
                        cwd=_REPO,
                        stdout=None if rank == 0 else out,
                        stderr=errors,
                        start_new_session=True,  # Ctrl-C is for us, and we end them
                    )
                )
        _wait(ranks, log_dir, time.monotonic() + timeout_s, timeout_s)
    finally:
        with uninterrupted():
            for process in ranks:
                end(process)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], log_dir: Path, deadline_s: float, timeout_s: float) -> None:
    """Until all ranks ended well."""
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            _linger(ranks)
            break
        if time.monotonic() > deadline_s:
            stacks = _stacks(ranks, log_dir)
            raise RankError(f"the ranks were not done after {timeout_s:.0f} s. Their stacks:\n{stacks}")
        time.sleep(_POLL_S)
    # The rank that failed first is not the one that is seen first: the other one loses its connection at once.
    failed = [_report(rank, ranks, log_dir) for rank, process in enumerate(ranks) if process.poll()]
    if failed:
        raise RankError("\n".join(failed))


def _linger(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    until_s = time.monotonic() + _GRACE_S
    while time.monotonic() < until_s and any(process.poll() is None for process in ranks):
        time.sleep(_POLL_S)


def _report(failed: int, ranks: Sequence[subprocess.Popen[bytes]], log_dir: Path) -> str:
    status = ranks[failed].returncode
    how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
    return f"rank {failed} {how}. The end of its output:\n{tail(log_dir / f'rank{failed}.err')}"


def _stacks(ranks: Sequence[subprocess.Popen[bytes]], log_dir: Path) -> str:
    for process in ranks:
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)  # the workers answer with their stacks
    time.sleep(1.0)
    return "\n".join(f"--- rank {rank}\n{tail(log_dir / f'rank{rank}.err')}" for rank in range(len(ranks)))


def tail(path: Path) -> str:
    """The last lines of a log; ``(nothing)`` for an empty one."""
    lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join(lines) if lines else "(nothing)"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a rank, and what it started, if it still runs."""
    if process.poll() is not None:
        return
    for number, patience_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, None)):
        os.killpg(process.pid, number)  # its own session: it leads the group
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
        return
