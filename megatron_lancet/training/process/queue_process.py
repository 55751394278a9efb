"""The process that Megatron keeps for a queue while a rank saves.

This file imports little: the process starts with a fresh interpreter, and the rank waits for it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def live_as_long_as(rank_pid: int) -> None:
    """Makes the calling process ignore SIGTERM, which schedulers send to all of a job, and end with its rank.

    If it did not ignore SIGTERM, the checkpoint of the last step would fail. If it did not end with a killed rank, it
    would stay forever and keep its memory. Only Linux offers the latter.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != rank_pid:  # the rank was killed before the call
            os._exit(1)
