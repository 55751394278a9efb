"""What chunks cost in GEMMs alone: the same arithmetic, cut into fewer rows at a time, without anything of ours.

    OMP_NUM_THREADS=1 python -m benchmarks.parts.gemm_rows [--repeats 21] [--output FILE.json]

The linear layers of a layer of the network benchmark's model, forward, dX and dW (added within the GEMM), in 1, 2 and 4
chunks. Variants take turns within one run, in an order that changes; the table has medians of paired ratios to 1 chunk.

Legend of shapes: T rows of a micro-batch, I inputs, O outputs.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from benchmarks.parts.frame import new_parser, paired_ratios, parsed, rounded, timed_ms, timed_pairs, write_result

CHUNKS = (1, 2, 4)


@dataclass(frozen=True)
class Linear:
    """A linear layer and the rows that it gets in a micro-batch."""

    name: str
    rows: int
    inputs: int
    outputs: int


HIDDEN, ROWS = 512, 2048
EXPERT_ROWS = ROWS // 2
"""Two experts on each of two ranks share the rows of both."""
LINEARS = [
    Linear("linear_qkv", ROWS, HIDDEN, 3 * HIDDEN),
    Linear("linear_proj", ROWS, HIDDEN, HIDDEN),
    Linear("expert 0, linear_fc1", EXPERT_ROWS, HIDDEN, 4 * HIDDEN),
    Linear("expert 0, linear_fc2", EXPERT_ROWS, 4 * HIDDEN, HIDDEN),
    Linear("expert 1, linear_fc1", EXPERT_ROWS, HIDDEN, 4 * HIDDEN),
    Linear("expert 1, linear_fc2", EXPERT_ROWS, 4 * HIDDEN, HIDDEN),
]


def passes(linear: Linear) -> dict[str, Callable[[int], object]]:
    """The GEMMs of a layer by pass; each takes the number of chunks."""
    input_TI, grad_TO = torch.randn(linear.rows, linear.inputs), torch.randn(linear.rows, linear.outputs)
    weight_OI, main_grad_OI = (torch.randn(linear.outputs, linear.inputs) for _ in range(2))

    def forward(num_chunks: int) -> object:
        return [input.matmul(weight_OI.t()) for input in input_TI.chunk(num_chunks)]

    def input_grad(num_chunks: int) -> object:
        return [grad.matmul(weight_OI) for grad in grad_TO.chunk(num_chunks)]

    def weight_grad(num_chunks: int) -> None:
        for input, grad in zip(input_TI.chunk(num_chunks), grad_TO.chunk(num_chunks), strict=True):
            main_grad_OI.addmm_(grad.t(), input)

    return {"forward": forward, "dX": input_grad, "dW": weight_grad}


def samples_ms(num_repeats: int) -> dict[str, dict[int, list[float]]]:
    """Per pass and number of chunks, the time of all layers in each repeat."""
    layers = [passes(linear) for linear in LINEARS]

    def all_layers(name: str, num_chunks: int) -> None:
        for layer in layers:  # another weight each time: it comes from memory, as in a step
            layer[name](num_chunks)

    names = list(layers[0])
    runs = {f"{name} {k}": partial(timed_ms, partial(all_layers, name, k)) for name in names for k in CHUNKS}
    for run in runs.values():
        run()  # warms up
    turns = timed_pairs(runs, num_repeats)
    samples = {name: {k: turns[f"{name} {k}"] for k in CHUNKS} for name in names}
    samples["all"] = {
        k: [sum(times) for times in zip(*(samples[name][k] for name in names), strict=True)] for k in CHUNKS
    }
    return samples


def main() -> None:
    """Measure and print."""
    args = parsed(new_parser(__doc__, repeats=21), "gemm_rows")
    torch.set_num_threads(1)
    samples = samples_ms(args.repeats)
    print("| GEMMs of a layer | 1 chunk | 2 chunks | 4 chunks |\n|---|---|---|---|")
    for name, by_chunks in samples.items():
        # The share of time that chunks add: the ratio of a chunked pass to the whole one.
        ratios = [paired_ratios(by_chunks[k], by_chunks[1]).median for k in CHUNKS[1:]]
        cells = " | ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"| {name} | {statistics.median(by_chunks[1]):.1f} ms | {cells} |")
    plain = {name: rounded({str(k): times for k, times in by_chunks.items()}, 3) for name, by_chunks in samples.items()}
    write_result(args, {"linears": [asdict(linear) for linear in LINEARS], "samples_ms": plain})


if __name__ == "__main__":
    main()
