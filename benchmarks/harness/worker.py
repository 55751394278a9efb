"""One rank of a benchmark: python -m benchmarks.harness.worker NAME JOB --core N, in its network namespace."""

import argparse
import ctypes
import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import te_layers as te
from benchmarks.harness.cases import Case
from benchmarks.harness.job import read_job
from megatron_lancet.files.atomic import atomic_write

_TIMEOUT = timedelta(seconds=90)
_PR_SET_PDEATHSIG = 1


@contextmanager
def _connected(has_te: bool) -> Iterator[tuple[str, str]]:
    """Connects the ranks; yields the shaped and the free interface. Megatron's groups use the shaped interface.

    Args:
        has_te: see :func:`benchmarks.te_layers.platform`.
    """
    # After the affinity is set: the threads that torch starts inherit it.
    platform = te.platform(has_te)
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from benchmarks.training_step.links import groups_on

    free, shaped = os.environ["GLOO_SOCKET_IFNAME"], os.environ["LANCET_SHAPED_IFNAME"]
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it describes each of the models at length
    with platform:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        with groups_on(shaped):  # what Megatron itself sends, gradient reductions above all
            parallel_state.initialize_model_parallel(
                expert_model_parallel_size=dist.get_world_size(), create_gloo_process_groups=False
            )
        yield shaped, free
        dist.barrier()
        dist.destroy_process_group()


def _measure_cases(cases: Sequence[Case], measure: Callable[[Case], dict[str, Any]], result: Path) -> None:
    """Measure all; rank 0 writes the result after each, so that a later failure does not lose the earlier ones."""
    import torch.distributed as dist

    done = []
    for case in cases:
        done.append(measure(case))
        if dist.get_rank() == 0:
            atomic_write(result, json.dumps({"cases": done}))


def measure(name: str, path: Path) -> None:
    """Connect the ranks and measure all cases of the job.

    Args:
        name: of the benchmark; its module ``measure`` has the class ``BENCH``.
        path: of the job.
    """
    job = read_job(path)
    with _connected(job.has_te) as (shaped, free):
        bench = importlib.import_module(f"benchmarks.{name}.measure").BENCH(job, shaped, free, _TIMEOUT)
        _measure_cases(job.cases, bench.measure, job.result)


def main() -> NoReturn:
    """Entry point of a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("job", type=Path)
    parser.add_argument("--core", type=int, required=True)
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank does not outlive the runner
    os.sched_setaffinity(0, {args.core})
    measure(args.name, args.job)
    sys.stdout.flush()
    # gloo's threads may outlive the interpreter's shutdown, and abort it.
    os._exit(0)


if __name__ == "__main__":
    main()
