"""A parallel ``map`` that keeps the order, bounds its memory and notices dead workers."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver

from megatron_lancet.errors import UsageError

_MAX_PENDING_PER_WORKER = 3
"""Batches in flight per worker: one in work, one to go on with, one done and waiting for its turn."""


def start_fork_server(preload_modules: Iterable[str]) -> None:
    """Start the process that forks the workers, so that it imports while this one goes on.

    Args:
        preload_modules: Modules imported once there instead of once in every worker.

    Without this call :func:`ordered_map` starts it, with nothing preloaded.
    """
    forkserver.set_forkserver_preload(list(preload_modules))
    forkserver.ensure_running()


def ordered_map[Item, Result](
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int
) -> Generator[Result]:
    """Results of ``function`` for ``items``, in the order of ``items``.

    The first failing item in that order raises, whichever worker fails first, so a faulty input gives the
    same error for any number of workers. Close the generator (``contextlib.closing``) to stop early.

    Args:
        function: Picklable, as are its items, results and exceptions.
        items: Read lazily, at most ``_MAX_PENDING_PER_WORKER`` per worker ahead of the results.
        num_workers: 1 works in this process and starts no other.

    Raises:
        UsageError: a worker was killed.
    """
    if num_workers == 1:
        yield from map(function, items)
        return
    # Plain fork would copy a process that may hold locks of torch's threads; spawn would import slowly
    # in every worker.
    context = multiprocessing.get_context("forkserver")
    executor = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_prepare_worker)
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(executor.submit(function, item))
            if len(pending) == num_workers * _MAX_PENDING_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UsageError(
            "a worker process was killed, most likely for lack of memory; no output was written, run again"
            " with fewer workers"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _prepare_worker() -> None:
    """Leave Ctrl-C to the parent, which cleans up, and never outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is always started by another process"
    multiprocessing.connection.wait([parent.sentinel])
    # A worker whose parent got SIGKILL would wait for work for ever.
    os._exit(1)
