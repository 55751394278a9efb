"""The process that serves Megatron's queue while a rank saves.

This file imports little, because the process starts with a fresh interpreter and the rank waits for it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def live_as_long_as(rank_pid: int) -> None:
    """Makes the calling process ignore SIGTERM, which schedulers send to all of a job, and end with its rank.

    Otherwise the checkpoint of the last step would fail, and the process would outlive a killed rank and keep its
    memory. Only Linux can end it with its rank.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != rank_pid:  # the rank was killed before the call
            os._exit(1)
