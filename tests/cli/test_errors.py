import subprocess
import sys
import time

import pytest

from megatron_lancet.errors import USAGE_EXIT_CODE

SCRIPT = """
from megatron_lancet.errors import UsageError, run_command
def main():
    raise UsageError("expected this, found that; do so")
run_command(main)
"""


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_first_rank_of_a_node_prints_the_error_and_all_fail(local_rank):
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={"LOCAL_RANK": local_rank}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (USAGE_EXIT_CODE, "error: expected this, found that; do so\n")
    if local_rank != "0":
        # torchrun ends all ranks with the first: so one message comes, unless the first rank saw no fault.
        assert time.monotonic() - start_s > 1


def test_closed_pipe_ends_the_command_quietly():
    script = "from megatron_lancet.errors import run_command\nrun_command(lambda: print('line\\n' * 100_000))"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "line\n"
        child.stdout.close()
        assert child.stderr.read() == ""
        assert child.wait(timeout=60) == 1
