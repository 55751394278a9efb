"""A check of a launch with layers of Transformer Engine, on forks of this process.

Usage: te_worker.py RESULT.json
"""

import faulthandler
import json
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.checks.bugs import BASE
from megatron_lancet.lab.check.check import check
from megatron_lancet.lab.check.shrink import shrink
from megatron_lancet.lab.check.words import read_command_line
from megatron_lancet.patching import replaced
from megatron_lancet.training.platform import detect
from tests import te_cpu

TIMEOUT_S = 60.0
LAUNCH = (
    *BASE,
    *"--tensor-model-parallel-size 4 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1".split(),
    *"--sequence-parallel --transformer-impl transformer_engine --moe-grouped-gemm --moe-permute-fusion".split(),
)


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    shrunk = shrink(read_command_line(LAUNCH), None, 2, with_te=True)
    with tempfile.TemporaryDirectory() as folder, replaced(detect, "cpu_platform", te_cpu.te_platform):
        found = check(shrunk, Path(folder), timeout_s=TIMEOUT_S)
    assert found.ours is not None, found.why_not_ours
    result: dict[str, object] = {"changes": shrunk.changes, "words": shrunk.words}
    result |= {name: vars(one) | {"wrong": one.wrong} for name, one in (("stock", found.stock), ("ours", found.ours))}
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
