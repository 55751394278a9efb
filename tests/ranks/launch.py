"""Starts the ranks of a distributed test, and says where each of them stands when they don't finish."""

import atexit
import functools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import te_cpu
from tests.ranks.preloaded import Preloaded, Rank

REPO = Path(__file__).parents[2]
_WORKER = Path(__file__).with_name("worker.py")
_STACK_DUMP_S = 3.0
_TAIL_CHARS = 4000
_PORT_ATTEMPTS = 3
_PORTS = range(20_000, 32_000)
_MOST_HOLDERS = 64
"""Ports that are held at once: a session asks for hundreds, and a process may open a thousand files."""
_holders: deque[socket.socket] = deque()


@dataclass(frozen=True)
class RankResult:
    """How one rank ended: exit status (negative: signal) and everything it printed."""

    returncode: int
    output: str


def free_port() -> int:
    """A port for rank 0, below those that the kernel deals out: gloo takes hundreds of these meanwhile.

    A socket that does not listen holds it, so that no other test finds it. Linux lets torch's store listen on it.
    """
    while True:
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", secrets.choice(_PORTS)))
        except OSError:
            holder.close()
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not before: another search would get it, too
        _holders.append(holder)
        if len(_holders) > _MOST_HOLDERS:
            _holders.popleft().close()
        port: int = holder.getsockname()[1]
        return port


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO),
        "PYTHONUNBUFFERED": "1",
    }


def preloaded(te: bool = False) -> Preloaded:
    """The process that forks ranks, started once. No GPU is visible to tests that start ranks: CUDA can't be forked.

    Args:
        te: the one whose Megatron has the tests' Transformer Engine.
    """
    return _preloaded(te)  # the cache takes a default for another argument


@functools.cache
def _preloaded(te: bool) -> Preloaded:
    folder = Path(tempfile.mkdtemp(prefix="ranks"))
    server = Preloaded(rank_environment(0, 1, 0), folder, te)

    def stop() -> None:
        server.stop()
        shutil.rmtree(folder)

    atexit.register(stop)
    return server


def start(
    script: Path,
    args: Sequence[object],
    num_ranks: int,
    log_dir: Path,
    env: Mapping[str, str] | None = None,
    per_rank: Sequence[Sequence[object]] | None = None,
    te: bool = False,
) -> list[Rank]:
    """Start one process per rank, its output in ``log_dir/rank<N>.log``.

    Args:
        per_rank: arguments that each rank gets in addition to the common ones.
        te: Megatron finds the tests' Transformer Engine in the ranks.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    port = free_port()
    server = preloaded(te)
    ranks: list[Rank] = []
    for rank in range(num_ranks):
        own = per_rank[rank] if per_rank is not None else ()
        command = [str(script), *map(str, [*args, *own])]
        environment = {**rank_environment(rank, num_ranks, port), **(te_cpu.ENVIRONMENT if te else {}), **(env or {})}
        log = log_dir / f"rank{rank}.log"
        log.write_text("")
        ranks.append(server.start(command, environment, log, REPO))
    return ranks


def finish(ranks: Sequence[Rank], log_dir: Path, timeout_s: float) -> list[RankResult]:
    """Wait for all ranks. If one is still running after ``timeout_s``, fail with every rank's stack."""
    deadline_s = time.monotonic() + timeout_s
    try:
        statuses = [rank.wait(max(0.1, deadline_s - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGUSR1)  # the workers answer with their stacks
        time.sleep(_STACK_DUMP_S)
        tails = [f"--- rank {i}\n{_log(log_dir, i)[-_TAIL_CHARS:]}" for i in range(len(ranks))]
        pytest.fail(f"ranks still running after {timeout_s} s:\n" + "\n".join(tails))
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    return [RankResult(status, _log(log_dir, i)) for i, status in enumerate(statuses)]


def run(
    script: Path,
    args: Sequence[object],
    num_ranks: int,
    log_dir: Path,
    timeout_s: float = 150,
    env: Mapping[str, str] | None = None,
    per_rank: Sequence[Sequence[object]] | None = None,
    te: bool = False,
) -> list[RankResult]:
    """Start the ranks and wait for them. See :func:`start`."""
    for _ in range(_PORT_ATTEMPTS):
        results = finish(start(script, args, num_ranks, log_dir, env, per_rank, te), log_dir, timeout_s)
        # Between finding a free port and rank 0 listening on it, another program may have taken it.
        if not any("EADDRINUSE" in result.output for result in results):
            break
    return results


def check(results: Sequence[RankResult]) -> None:
    """Fail unless all ranks ended well."""
    failed = [
        f"--- rank {i}: exit {r.returncode}\n{r.output[-_TAIL_CHARS:]}" for i, r in enumerate(results) if r.returncode
    ]
    if failed:
        pytest.fail("\n".join(failed))


class Te(NamedTuple):
    """The device that Transformer Engine finds in a rank, see :func:`tests.te_cpu.te_platform`."""

    capability: tuple[int, int] = (9, 0)
    interprets_triton: bool = False


def results_of(
    work: Callable[..., Any],
    num_ranks: int,
    folder: Path,
    timeout_s: float = 150,
    args: Sequence[object] = (),
    te: Te | None = None,
    joins: bool = True,
    is_bare: bool = False,
) -> list[Any]:
    """Call a function of a test on several ranks, and read what each of them returned. See :mod:`tests.ranks.worker`.

    Args:
        args: of the function, as JSON.
        te: Megatron finds the tests' Transformer Engine in the ranks.
        joins: a gloo process group joins the ranks; otherwise the only rank makes a mocked world.
        is_bare: neither Megatron's CPU settings nor a process group: the function makes runs of its own.
    """
    settings = {"args": [*args], "te": te, "joins": joins and not is_bare, "is_bare": is_bare}
    command = [f"{work.__module__}:{work.__qualname__}", folder / "result.json", json.dumps(settings)]
    check(run(_WORKER, command, num_ranks, folder, timeout_s, te=te is not None))
    return [json.loads((folder / f"result.json.{rank}").read_text()) for rank in range(num_ranks)]


def results(work: Callable[..., Any], num_ranks: int, timeout_s: float = 150, **settings: Any) -> Any:
    """A module's fixture: what :func:`results_of` reads, by rank."""

    @pytest.fixture(scope="module")
    def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
        return results_of(work, num_ranks, tmp_path_factory.mktemp("ranks"), timeout_s, **settings)

    return found


def result(work: Callable[..., Any], timeout_s: float = 150, **settings: Any) -> Any:
    """A module's fixture: what one rank returned, see :func:`results_of`."""

    @pytest.fixture(scope="module")
    def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
        return results_of(work, 1, tmp_path_factory.mktemp("rank"), timeout_s, **settings)[0]

    return found


def _log(log_dir: Path, rank: int) -> str:
    return (log_dir / f"rank{rank}.log").read_text(errors="replace")
