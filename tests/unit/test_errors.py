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


@pytest.mark.parametrize(("local_rank", "said"), [("0", "error: expected this, found that; do so\n"), ("1", "")])
def test_one_rank_of_a_node_speaks_and_all_fail(local_rank, said, tmp_path):
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={"LOCAL_RANK": local_rank}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (USAGE_EXIT_CODE, said)
    if not said:
        # torchrun ends all ranks with the first: the silent ones must not be it.
        assert time.monotonic() - start_s > 1
