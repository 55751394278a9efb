"""The frame of a worker script: python SCRIPT RESULT.json. Each rank writes RESULT.json.<rank>."""

import faulthandler
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_lancet.training.platform.cpu import cpu_platform


def run_on_cpu(main: Callable[[], None]) -> None:
    """Runs a worker under Megatron's CPU settings; SIGUSR1 prints its stacks, which the launcher asks for."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with cpu_platform():
        main()


def finish(results: dict[str, Any]) -> None:
    """Writes the results where :func:`tests.ranks.launch.results_of` reads them; ends process groups once all have."""
    Path(f"{sys.argv[1]}.{dist.get_rank()}").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
