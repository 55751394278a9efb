"""The dWs of a weight over the chunks of a micro-batch: separate GEMMs or a joined one, with or without a temporary.

    OMP_NUM_THREADS=1 python benchmarks/parts/weight_grad.py [--repeats 31] [--output FILE.json]

Variants take turns within one run, in an order that changes from repeat to repeat; the table has the median time of
each and the median of its paired ratios to the first one (above 1: faster than the first).

Legend of shapes: T rows of a chunk, I inputs, O outputs.
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

NUM_CHUNKS = 2
Variants = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Linear:
    """A dW: grad [T, O] and input [T, I] of each chunk."""

    rows: int
    inputs: int
    outputs: int
    dtype: str = "float32"


LINEARS = [
    Linear(64, 256, 256),
    Linear(64, 256, 1024),
    Linear(512, 256, 1024),
    Linear(2048, 256, 1024),
    Linear(512, 1024, 1024),
    Linear(64, 1024, 4096),
    Linear(512, 512, 8192),
    Linear(512, 256, 1024, "bfloat16"),
]


def variants(case: Linear) -> Variants:
    """Three ways to add the dWs of all chunks to a main gradient in fp32."""
    dtype = getattr(torch, case.dtype)
    grads = [torch.randn(case.rows, case.outputs, dtype=dtype) for _ in range(NUM_CHUNKS)]
    inputs = [torch.randn(case.rows, case.inputs, dtype=dtype) for _ in range(NUM_CHUNKS)]
    main_grad = torch.zeros(case.outputs, case.inputs)

    def separate() -> None:
        for grad, input in zip(grads, inputs, strict=True):
            main_grad.add_(grad.t().matmul(input))

    def addmm() -> None:
        for grad, input in zip(grads, inputs, strict=True):
            main_grad.addmm_(grad.t(), input)

    def joined() -> None:
        main_grad.add_(torch.cat(grads).t().matmul(torch.cat(inputs)))

    def joined_addmm() -> None:
        main_grad.addmm_(torch.cat(grads).t(), torch.cat(inputs))

    runs = {"separate matmul+add_": separate, "joined cat, matmul+add_": joined}
    if dtype is torch.float32:  # addmm_ wants equal types
        runs |= {"separate addmm_": addmm, "joined cat, addmm_": joined_addmm}
    return runs


def samples_us(runs: Variants, num_repeats: int) -> dict[str, list[float]]:
    """Time of each variant in each repeat."""
    for run in runs.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    dice = random.Random(0)  # noqa: S311
    for _ in range(num_repeats):
        for name in dice.sample(list(runs), len(runs)):
            start_s = time.perf_counter()
            runs[name]()
            samples[name].append((time.perf_counter() - start_s) * 1e6)
    return samples


def report(case: Linear, samples: dict[str, list[float]]) -> dict[str, object]:
    """Print a case's lines and return it for the JSON file."""
    print(" ".join(f"{name}={value}" for name, value in asdict(case).items()))
    first: Sequence[float] = next(iter(samples.values()))
    results = {}
    for name, times in samples.items():
        ratio = statistics.median(a / b for a, b in zip(first, times, strict=True))
        results[name] = {"median_us": round(statistics.median(times), 1), "median_ratio": round(ratio, 3)}
        print(f"  {name:36} {results[name]['median_us']:10.1f} us {ratio:6.2f}")
    rounded = {name: [round(us, 1) for us in times] for name, times in samples.items()}
    return {"case": asdict(case), "results": results, "samples_us": rounded}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=31, help="of each variant in each case (31)")
    parser.add_argument("--output", type=Path, help="JSON with every sample")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.no_grad():
        results = [report(case, samples_us(variants(case), args.repeats)) for case in LINEARS]
    if args.output is not None:
        where = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        args.output.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **where, "cases": results}) + "\n")


if __name__ == "__main__":
    main()
