"""The dWs of a weight over the chunks of a micro-batch: separate GEMMs or a joined one, with or without a temporary.

    OMP_NUM_THREADS=1 python -m benchmarks.parts.weight_grad [--repeats 31] [--output FILE.json]

Variants take turns within one run, in an order that changes from repeat to repeat; the table has the median time of
each and the median of its paired ratios to the first one (above 1: faster than the first).

Legend of shapes: T rows of a chunk, I inputs, O outputs.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import torch

from benchmarks.parts.frame import new_parser, paired_ratios, parsed, rounded, timed_ms, timed_pairs, write_result

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


def _time_us(run: Callable[[], object]) -> float:
    return 1e3 * timed_ms(run)


def measure(case: Linear, num_repeats: int) -> dict[str, object]:
    """Time a case, print its lines and return it for the JSON file."""
    runs = variants(case)
    for run in runs.values():
        run()
    samples = timed_pairs({name: partial(_time_us, run) for name, run in runs.items()}, num_repeats)
    print(" ".join(f"{name}={value}" for name, value in asdict(case).items()))
    first = next(iter(samples.values()))
    results = {}
    for name, times in samples.items():
        ratio = paired_ratios(first, times).median
        results[name] = {"median_us": round(statistics.median(times), 1), "median_ratio": round(ratio, 3)}
        print(f"  {name:36} {results[name]['median_us']:10.1f} us {ratio:6.2f}")
    return {"case": asdict(case), "results": results, "samples_us": rounded(samples, 1)}


def main() -> None:
    """Measure and print."""
    args = parsed(new_parser(__doc__, repeats=31), "weight_grad")
    torch.manual_seed(0)
    with torch.no_grad():
        cases = [measure(case, args.repeats) for case in LINEARS]
    write_result(args, {"threads": torch.get_num_threads(), "cases": cases})


if __name__ == "__main__":
    main()
