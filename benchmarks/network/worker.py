"""One rank of the benchmark: python -m benchmarks.network.worker JOB --core N, in its network namespace."""

import argparse
import ctypes
import faulthandler
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

from benchmarks.network.job import read_job
from megatron_lancet.files import atomic_write

TIMEOUT = timedelta(seconds=90)
_PR_SET_PDEATHSIG = 1


@contextmanager
def connected() -> Iterator[tuple[str, str]]:
    """The ranks, connected; the names of the shaped and of the free interface. Megatron's groups use the shaped one."""
    # After the affinity is set: the threads that torch starts inherit it.
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from benchmarks.network.links import groups_on
    from megatron_lancet.training.platform.cpu import cpu_platform

    free, shaped = os.environ["GLOO_SOCKET_IFNAME"], os.environ["LANCET_SHAPED_IFNAME"]
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it describes each of the models at length
    with cpu_platform():
        dist.init_process_group("gloo", timeout=TIMEOUT)
        with groups_on(shaped):  # what Megatron itself sends, gradient reductions above all
            parallel_state.initialize_model_parallel(
                expert_model_parallel_size=dist.get_world_size(), create_gloo_process_groups=False
            )
        yield shaped, free
        dist.barrier()
        dist.destroy_process_group()


def measure_cases[C](cases: Sequence[C], measure: Callable[[C], dict[str, Any]], result: Path) -> None:
    """Measure all; rank 0 writes the result after each, so that a later failure does not lose the earlier ones."""
    import torch
    import torch.distributed as dist

    done = []
    for case in cases:
        done.append(measure(case))
        if dist.get_rank() == 0:
            atomic_write(result, json.dumps({"torch": torch.__version__, "cases": done}))


def measure(path: Path) -> None:
    """Connect the ranks and measure all cases of the job."""
    job = read_job(path)
    with connected() as (shaped, free):
        from benchmarks.network.measure import Bench

        bench = Bench(job, shaped, free, TIMEOUT)
        measure_cases(job.cases, bench.measure, job.result)


def run_as_rank(measure: Callable[[Path], None]) -> NoReturn:
    """Entry point of a rank.

    Args:
        measure: does the work; gets the job's path.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("--core", type=int, required=True)
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank does not outlive the runner
    os.sched_setaffinity(0, {args.core})
    measure(args.job)
    sys.stdout.flush()
    # gloo's threads may outlive the interpreter's shutdown, and abort it.
    os._exit(0)


if __name__ == "__main__":
    run_as_rank(measure)
