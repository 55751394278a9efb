"""Ends a rank that does not go on, and saves where it stands."""

import faulthandler
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.gpu.record import Recorder

STUCK_STATUS = 3
"""Exit status of a rank that was ended."""
_POLL_S = 0.1
_LOCKED_S = 3.0
"""After which a rank is ended whose threads can't run Python."""
_MOST_CHARS = 6000


class Watchdog:
    """A thread that ends the process when a piece of work takes too long, or when it gets SIGUSR1.

    The main thread can't do that: it may wait in a collective, where no handler of a signal runs.

    Attributes:
        position: the collective that the rank has reached.
    """

    def __init__(self, record: Recorder) -> None:
        """To be called before other threads are started: they inherit that SIGUSR1 is blocked."""
        self.position: Callable[[], str] = lambda: "before the first model"
        self._record = record
        self._work, self._end_s = "set-up", math.inf
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        threading.Thread(target=self._watch, daemon=True).start()

    @contextmanager
    def limit(self, work: str, seconds: float) -> Iterator[None]:
        """Inside the context the rank does ``work``, and is ended after a number of seconds."""
        self._work, self._end_s = work, time.monotonic() + seconds
        faulthandler.dump_traceback_later(seconds + _LOCKED_S, exit=True)
        try:
            yield
        finally:
            self._end_s = math.inf
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while True:
            asked = signal.sigtimedwait({signal.SIGUSR1}, _POLL_S) is not None
            if asked or time.monotonic() > self._end_s:
                self._save("another rank has failed, or the time is up" if asked else "it takes longer than its limit")
                os._exit(STUCK_STATUS)

    def _save(self, why: str) -> None:
        error = f"{self._work} was ended, since {why}. This rank stands here: {self.position()}"
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            self._record.add(self._work, error=error, frames=file.read()[-_MOST_CHARS:])
