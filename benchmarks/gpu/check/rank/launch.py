"""Starts ranks as processes of their own, and leaves none of them running."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.gpu.record import read_records
from megatron_lancet.training.platform.cuda_connections import CONNECTIONS, RECOMMENDED

REPO = Path(__file__).parents[4]
_GRACE_S = 2.0
"""Ranks that wait for one that has failed are ended after so long: they may fail with the same error a little later."""
_DUMP_S = 3.0
"""For a rank to save where it stands."""
_POLL_S = 0.05


class Process(Protocol):
    """A running rank."""

    returncode: int | None

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """Sends a signal if it still runs."""

    def kill(self) -> None:
        """Ends it, and what it has started, at once."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit status."""


class _Group(subprocess.Popen[bytes]):
    """A process with a group of its own, which ends as a whole."""

    def kill(self) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)


def start_process(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Starts a rank; its output goes to ``log``."""
    with log.open("wb") as file:
        return _Group(
            [sys.executable, "-m", "benchmarks.gpu.check.rank", *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def environment_of(rank: int, num_ranks: int, port: int, shares_device: bool) -> dict[str, str]:
    """Variables of a rank.

    Args:
        shares_device: all ranks use the first device. NCCL refuses two ranks of one host on one device; ranks whose
            hosts have different names talk over sockets, here through the loopback interface.
    """
    found = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": "0" if shares_device else str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH")))),
        CONNECTIONS: str(RECOMMENDED),
    }
    if shares_device:
        found |= {
            "NCCL_HOSTID": f"rank{rank}",
            "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_MNNVL_ENABLE": "0",
        }
    return found


class Ranks:
    """Ranks that run, and the results that they have saved.

    Attributes:
        processes: by rank.
    """

    def __init__(
        self, num_ranks: int, port: int, folder: Path, arguments: Sequence[str], shares_device: bool = False
    ) -> None:
        """
        Args:
            folder: for results and logs.
            arguments: of each rank, after the name of its file.
        """
        self.processes: list[Process] = []
        self._folder = folder
        self._num_taken = [0] * num_ranks
        try:
            for rank in range(num_ranks):
                environment = environment_of(rank, num_ranks, port, shares_device)
                words = [str(self._file(rank)), *arguments]
                self.processes.append(start_process(words, environment, self._log(rank)))
        except BaseException:
            self.kill()
            raise

    def wait(self, limit_s: float, saved: Callable[[int, dict[str, object]], None]) -> None:
        """Waits until all ranks have ended, or ends them: when one has failed, or after a time.

        Args:
            limit_s: for all of it.
            saved: called with a rank and each of its results, soon after it was saved.
        """
        end_s = time.monotonic() + limit_s
        while self._any_runs() and not self._any_failed() and time.monotonic() < end_s:
            self._take(saved)
            time.sleep(_POLL_S)
        if self._any_failed():
            self._wait_at_most(_GRACE_S)
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        self._wait_at_most(_DUMP_S)
        self.kill()
        self._take(saved)

    def kill(self) -> None:
        """Ends the ranks that still run."""
        for process in self.processes:
            process.kill()
            process.wait()

    def log(self, rank: int) -> str:
        """What a rank has printed."""
        return self._log(rank).read_text(errors="replace")

    def _take(self, saved: Callable[[int, dict[str, object]], None]) -> None:
        for rank in range(len(self.processes)):
            records = read_records(self._file(rank))
            for record in records[self._num_taken[rank] :]:
                saved(rank, record)
            self._num_taken[rank] = len(records)

    def _any_runs(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def _any_failed(self) -> bool:
        return any(process.poll() not in (None, 0) for process in self.processes)

    def _wait_at_most(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while self._any_runs() and time.monotonic() < end_s:
            time.sleep(_POLL_S)

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.jsonl"

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"
