"""One core for threads of which exactly one runs at any time.

The scheduler wakes each of them up on another core, whose caches have nothing of what the one before worked on. On one
core, a step in pairs took a seventh less of the host's time (``benchmarks/host_time``).
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_PROCESSOR = 36
"""Place of the core in /proc/*/stat behind the name in brackets, see proc(5)."""


class SharedCore:
    """Keeps threads on the core of the first one for a while.

    A thread that is started meanwhile inherits the core. So nothing is kept in the first steps of a plan, in which
    libraries start their threads, nor where operators run on several threads.
    """

    def __init__(self) -> None:
        self._core: int | None = None
        self._allowed: dict[int, set[int]] = {}
        """By thread that is kept: the cores that it may use otherwise."""

    @contextmanager
    def kept(self, *others: int) -> Iterator[None]:
        """Inside, the caller and other threads stay on the caller's core.

        Args:
            others: native numbers of threads.
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
        """Keeps one more thread, in :meth:`kept`; elsewhere nothing happens."""
        if self._core is None or thread in self._allowed:
            return
        allowed = os.sched_getaffinity(thread)
        try:
            os.sched_setaffinity(thread, {self._core})
        except OSError:  # a container may have taken the core away: the thread stays where it is
            self._core = None
        else:
            self._allowed[thread] = allowed


def _can_keep() -> bool:
    return torch.get_num_threads() == 1 and hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1


def _core_of(thread: int) -> int:
    text = Path(f"/proc/self/task/{thread}/stat").read_text()
    return int(text.rpartition(")")[2].split()[_PROCESSOR])
