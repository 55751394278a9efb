"""One rank of the benchmark: python -m benchmarks.priority.worker JOB --core N, in its network namespace."""

from pathlib import Path

from benchmarks.network.job import read_job
from benchmarks.network.worker import TIMEOUT, connected, measure_cases, run_as_rank


def measure(path: Path) -> None:
    """Connect the ranks and measure all cases of the job."""
    job = read_job(path)
    with connected() as (shaped, free):
        from benchmarks.priority.measure import PriorityBench

        bench = PriorityBench(job, shaped, free, TIMEOUT)
        measure_cases(job.cases, bench.measure, job.result)


if __name__ == "__main__":
    run_as_rank(measure)
