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
"""Batches per worker: one in work, one to continue with, one done whose predecessors are not."""


def start_fork_server(preload_modules: Iterable[str]) -> None:
    """Start the process that forks the workers, so that it imports modules while this one continues.

    Args:
        preload_modules: modules imported once there instead of once in every worker.

    Without this call :func:`ordered_map` starts that process, with nothing preloaded.
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
        function: picklable, as are its items, results and exceptions.
        items: read lazily, at most ``_MAX_PENDING_PER_WORKER`` per worker ahead of the results.
        num_workers: number of processes; 1 works in this process and starts no other.

    Raises:
        UsageError: a worker was killed.
    """
    if num_workers == 1:
        yield from map(function, items)
        return
    # Plain fork would copy a process that may hold locks of torch's threads; spawn would import slowly in each worker.
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
    """Leaves Ctrl-C to the parent, which cleans up, and makes the worker end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is always started by another process"

    def exit_with_parent() -> None:
        # A worker whose parent was killed would wait for work forever.
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
