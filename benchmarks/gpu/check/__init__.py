"""The first ten minutes on a GPU, in parts that save as they go: ``tools/check_gpu.py`` runs all of them."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from benchmarks.gpu.check.driver import Check


def start(folder: Path, is_rehearsal: bool, device: str, commit: str | None) -> "Check":
    """A check with the environment of this process, which from now on ends by an exception on SIGTERM.

    Args:
        device: whose prediction is compared, for example ``H100``.
        commit: commit of the code where git can't say it.
    """
    from benchmarks.gpu.check.driver import Check
    from megatron_lancet.training.platform.cuda_connections import CONNECTIONS, RECOMMENDED

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    environment = {CONNECTIONS: str(RECOMMENDED), **os.environ, "PYTHONUNBUFFERED": "1"}
    if is_rehearsal:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return Check(folder, is_rehearsal, device, environment, commit)
