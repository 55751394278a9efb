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
from tests.te_cpu import te_platform


def run_on_cpu(main: Callable[[], None]) -> None:
    """Runs a worker under Megatron's CPU settings; SIGUSR1 prints its stacks, which the launcher asks for."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with cpu_platform():
        main()


def run_on_cpu_with_te(
    main: Callable[[], None], capability: tuple[int, int] = (9, 0), interprets_triton: bool = False
) -> None:
    """As :func:`run_on_cpu`, with Transformer Engine's layers: for a worker that is launched with ``te=True``.

    Args:
        capability: see :func:`tests.te_cpu.te_platform`.
        interprets_triton: see there.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with te_platform(capability, interprets_triton):
        main()


def finish(results: dict[str, Any]) -> None:
    """Writes the results where :func:`tests.ranks.launch.results_of` reads them; ends process groups once all have."""
    Path(f"{sys.argv[1]}.{dist.get_rank()}").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
