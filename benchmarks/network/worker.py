"""One rank of the benchmark: python -m benchmarks.network.worker JOB --core N, in its network namespace."""

import argparse
import ctypes
import faulthandler
import json
import logging
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

from benchmarks.network.job import Job, read_job

_TIMEOUT = timedelta(seconds=90)
_PR_SET_PDEATHSIG = 1


def measure(job: Job) -> None:
    """Connect the ranks and measure all cases; rank 0 writes the result."""
    # After the affinity is set: the threads that torch starts inherit it.
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from benchmarks.network.links import groups_on
    from benchmarks.network.measure import Bench
    from megatron_lancet.training.cpu_platform import cpu_platform

    free, shaped = os.environ["GLOO_SOCKET_IFNAME"], os.environ["LANCET_SHAPED_IFNAME"]
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it describes each of the models at length
    with cpu_platform():
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        with groups_on(shaped):  # what Megatron itself sends, gradient reductions above all
            parallel_state.initialize_model_parallel(
                expert_model_parallel_size=dist.get_world_size(), create_gloo_process_groups=False
            )
        bench = Bench(job, shaped, free, _TIMEOUT)
        cases = []
        for case in job.cases:
            cases.append(bench.measure(case))
            if dist.get_rank() == 0:  # after each: a later failure does not lose the earlier ones
                partial = job.result.with_suffix(".partial")
                partial.write_text(json.dumps({"torch": torch.__version__, "cases": cases}))
                partial.replace(job.result)
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """Entry point of a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--core", type=int, required=True)
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank does not outlive the runner
    os.sched_setaffinity(0, {args.core})
    measure(read_job(args.job))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # gloo's threads may outlive the interpreter's shutdown, and abort it.
    os._exit(0)
