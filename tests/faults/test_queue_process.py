"""The process that Megatron keeps for a queue while it saves: SIGTERM leaves it, and it is gone with its rank."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RANK = """
import multiprocessing, os, sys
from multiprocessing.managers import SyncManager
from megatron_lancet.features.checkpoints.queue_process import live_as_long_as

if __name__ == "__main__":
    manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
    manager.start(live_as_long_as, (int(sys.argv[1]) or os.getpid(),))
    queue = manager.Queue()
    print(manager._process.pid, flush=True)
    for line in sys.stdin:
        queue.put(line)
        print(queue.get().strip(), flush=True)
"""
GONE_WITHIN_S = 20


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state != "Z"  # whoever adopts it may be slow to reap it
    except FileNotFoundError:
        return False


@pytest.fixture
def rank():
    command = [sys.executable, "-c", RANK, "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_queue_process_survives_sigterm_and_ends_with_its_rank(rank):
    queue_pid = int(rank.stdout.readline())
    os.kill(queue_pid, signal.SIGTERM)
    rank.stdin.write("still there\n")
    rank.stdin.flush()
    assert rank.stdout.readline() == "still there\n"
    assert is_running(queue_pid)
    rank.kill()
    rank.wait()
    deadline_s = time.monotonic() + GONE_WITHIN_S
    while is_running(queue_pid):
        assert time.monotonic() < deadline_s, "it outlived a killed rank"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_queue_process_does_not_start_without_its_rank():
    done = subprocess.run(
        [sys.executable, "-c", RANK, "1"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
    )
    assert done.returncode != 0
    assert "EOFError" in done.stderr
