"""One core for threads that take turns.

Exactly one of them runs at any time. The scheduler wakes each thread up on an idle core with cold caches, which costs
a step in pairs a part of its host time: ``benchmarks/host_time`` measures both.
"""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

_PROCESSOR = 36
"""Place of the core in /proc/*/stat behind the name in brackets, see proc(5)."""
_CORES_PER_RANK = 2


class SharedCore:
    """Keeps threads on one core for a while.

    Threads that start meanwhile inherit the core, so the first steps of a plan, in which libraries start theirs, run
    without it. So does a rank whose operators run on several threads, or whose node has fewer than two cores a rank:
    two ranks could share a core. A launcher may bind each rank to cores of its own; the node's cores are then the cores
    of the process that started the rank.
    """

    def __init__(self) -> None:
        self._core: int | None = None
        self._allowed: dict[int, set[int]] = {}
        """The cores that each kept thread may use otherwise."""
        own = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _free_child(own()))

    @contextmanager
    def kept(self, *others: int) -> Iterator[None]:
        """Inside, the caller and other threads stay on the caller's core.

        Args:
            others: native thread numbers.
        """
        own = threading.get_native_id()
        self._core = _core_of(own) if _can_keep() else None
        try:
            for thread in (own, *others):
                self.keep(thread)
            yield
        finally:
            self._core = None
            while self._allowed:
                with suppress(OSError):  # the thread has ended, or a container has taken cores away meanwhile
                    os.sched_setaffinity(*self._allowed.popitem())

    def keep(self, thread: int) -> None:
        """Keeps one more thread until :meth:`kept` ends; outside of it does nothing."""
        if self._core is None or thread in self._allowed:
            return
        allowed = os.sched_getaffinity(thread)
        try:
            os.sched_setaffinity(thread, {self._core})
        except OSError:  # a container may have taken the core away: the thread stays where it is
            self._core = None
        else:
            self._allowed[thread] = allowed


def _free_child(shared: SharedCore | None) -> None:
    """Gives a process that starts in a step, such as a worker of a data loader, its cores back."""
    if shared is not None and shared._allowed:
        os.sched_setaffinity(0, next(iter(shared._allowed.values())))


def _can_keep() -> bool:
    if torch.get_num_threads() > 1 or not hasattr(os, "sched_setaffinity"):
        return False
    own = found = len(os.sched_getaffinity(0))
    with suppress(OSError):  # the process that started the rank has ended
        found = max(own, len(os.sched_getaffinity(os.getppid())))
    return own > 1 and found >= _CORES_PER_RANK * _ranks_of_node()


def _ranks_of_node() -> int:
    """Ranks on this node: all ranks where the launcher does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or (dist.get_world_size() if dist.is_initialized() else 1))


def _core_of(thread: int) -> int:
    text = Path(f"/proc/self/task/{thread}/stat").read_text()
    return int(text.rpartition(")")[2].split()[_PROCESSOR])
