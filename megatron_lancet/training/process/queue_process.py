"""The process that Megatron keeps for a queue while a rank saves. Imports little: it starts anew, and is waited for."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def live_as_long_as(rank_pid: int) -> None:
    """Called in that process: it lives through SIGTERM, which schedulers send to all of a job, and dies with its rank.

    Without the former the checkpoint of the last step would fail. Without the latter the process of a killed rank
    stays for ever, with what it holds of memory; only Linux can be told.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != rank_pid:  # it was killed before
            os._exit(1)
