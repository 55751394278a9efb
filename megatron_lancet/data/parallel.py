"""A parallel ``map`` that keeps the order, bounds its memory and notices dead workers."""

import multiprocessing
import queue
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

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
    workers = [_Worker(context) for _ in range(num_workers)]
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def call(item: Item) -> Any:
        worker = idle.get()
        try:
            return worker.call(function, item)
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(num_workers)
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(threads.submit(call, item))
            if len(pending) == num_workers * _MAX_PENDING_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
        threads.shutdown()
        for worker in workers:
            worker.close()


class _Worker:
    """A process that works for one thread at a time.

    No other process holds the worker's end of its pipe. If the worker is killed, even in the middle of a result,
    reading fails. The workers of a ``ProcessPoolExecutor`` share one pipe: half a result there blocks the reader.
    """

    def __init__(self, context: ForkServerContext) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, function: Callable[[Any], Any], item: Any) -> Any:
        """Returns or raises what ``function`` does for ``item``.

        Raises:
            UsageError: the worker was killed.
        """
        try:
            self._pipe.send((function, item))
            has_failed, result = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise UsageError(
                "a worker process was killed, most likely for lack of memory; no output was written, run again"
                " with fewer workers"
            ) from error
        if has_failed:
            raise result
        return result

    def terminate(self) -> None:
        """Ends the process at once; a call that waits for its result fails."""
        self._process.terminate()
        self._process.join()

    def close(self) -> None:
        """Closes the pipe, once no call uses it."""
        self._pipe.close()


def _serve(pipe: "Connection[Any, Any]") -> None:
    """Answers calls until the parent closes its end of the pipe, or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which cleans up
    while True:
        try:
            function, item = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = ForkingPickler.dumps((False, function(item)))
        except Exception as error:  # noqa: BLE001 - it is raised again where the result is awaited
            answer = ForkingPickler.dumps((True, error))
        try:
            pipe.send_bytes(answer)
        except ConnectionError:
            return
