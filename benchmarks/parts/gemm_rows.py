"""What chunks cost in GEMMs alone: the same arithmetic, cut into fewer rows at a time, without anything of ours.

    OMP_NUM_THREADS=1 python benchmarks/parts/gemm_rows.py [--repeats 21] [--output FILE.json]

The linear layers of a layer of the network benchmark's model, forward, dX and dW (added within the GEMM), in 1, 2 and 4
chunks. Variants take turns within one run, in an order that changes; the table has medians of paired ratios to 1 chunk.

Legend of shapes: T rows of a micro-batch, I inputs, O outputs.
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

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
    samples: dict[str, dict[int, list[float]]] = {name: {k: [] for k in CHUNKS} for name in layers[0]}
    dice = random.Random(0)  # noqa: S311 - an order, no secret
    for repeat in range(num_repeats + 1):
        turns = [(name, k) for name in samples for k in CHUNKS]
        dice.shuffle(turns)
        for name, num_chunks in turns:
            start_s = time.perf_counter()
            for layer in layers:  # another weight each time: it comes from memory, as in a step
                layer[name](num_chunks)
            if repeat > 0:  # the first one warms up
                samples[name][num_chunks].append((time.perf_counter() - start_s) * 1e3)
    samples["all"] = {
        k: [sum(times) for times in zip(*(samples[name][k] for name in layers[0]), strict=True)] for k in CHUNKS
    }
    return samples


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21, help="of each variant in each case (21)")
    parser.add_argument("--output", type=Path, help="JSON with all samples")
    args = parser.parse_args()
    torch.set_num_threads(1)
    samples = samples_ms(args.repeats)
    print("| GEMMs of a layer | 1 chunk | 2 chunks | 4 chunks |\n|---|---|---|---|")
    for name, by_chunks in samples.items():
        one = by_chunks[1]
        ratios = [statistics.median(b / a for a, b in zip(one, by_chunks[k], strict=True)) for k in CHUNKS[1:]]
        print(f"| {name} | {statistics.median(one):.1f} ms | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |")
    if args.output is not None:
        about = {"torch": torch.__version__, "machine": platform.machine(), "linears": [asdict(x) for x in LINEARS]}
        args.output.write_text(json.dumps({**about, "samples_ms": samples}) + "\n")


if __name__ == "__main__":
    main()
