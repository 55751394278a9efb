"""Launches and modelled steps with and without CUDA graphs of attention and routing: python -m benchmarks.parts.graphs.

    python -m benchmarks.parts.graphs [--launch-us 4 8 16 48] [--link 10:350] [--output FILE.json]

Four layers of Qwen3-30B-A3B as rank 0 of eight, four micro-batches of two samples of 2048 tokens, Megatron's local
layers, on a virtual GPU without values. What a step enqueues is real; the device's time is a model's. Nothing is timed.
"""

import logging
import warnings
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.sizes import SIZES
from benchmarks.gpu.variants import PLANS, Variant, Work
from benchmarks.harness.tables import aligned
from benchmarks.parts.frame import new_parser, parsed, write_result
from megatron_lancet.errors import run_command
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.virtual_gpu.log import Entry, GraphLaunched, Kernel
from megatron_lancet.training.platform.cpu import cpu_platform

VARIANTS = {
    "stock": Variant(),
    "one chunk": Variant(PLANS["ours k=1"]),
    "one chunk, graphs": Variant(PLANS["ours k=1"], is_captured=True),
    "two chunks": Variant(PLANS["ours k=2"]),
    "two chunks, graphs": Variant(PLANS["ours k=2"], is_captured=True),
    "pairs": Variant(PLANS["pairs"]),
    "pairs, graphs": Variant(PLANS["pairs"], is_captured=True),
}
SIZE = replace(SIZES["qwen3-like"], micro_batch=2, seq_length=2048)
NUM_RANKS, NUM_MICRO_BATCHES = 8, 4
LAUNCHES_US = (4.0, 8.0, 16.0, 48.0)
"""The last one was measured on a virtual machine with an H200, Python and autograd included."""
BYTES_PER_S = 3.6e12
"""Of an H200's memory: what a kernel reaches."""


def num_launches(log: list[Entry]) -> tuple[int, int]:
    """Kernels and graphs that the host launches, and kernels that run in graphs."""
    graphs = [entry for entry in log if isinstance(entry, GraphLaunched)]
    in_graphs = sum(entry.num_kernels for entry in graphs)
    return sum(isinstance(entry, Kernel) for entry in log) + len(graphs) - in_graphs, in_graphs


def main() -> None:
    """Prints a table."""
    from benchmarks.gpu.check.predict.recorded import device_model, record
    from megatron_lancet.testkit.virtual_gpu.playback.player import play

    parser = new_parser(__doc__)
    parser.add_argument("--launch-us", type=float, nargs="+", default=LAUNCHES_US, help="host time of a kernel")
    parser.add_argument("--link", type=Link.parse, default=Link(10, 350), metavar="LATENCY_US:GBYTES_PER_S")
    args = parsed(parser, "graphs")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    work = Work(SIZE, NUM_RANKS, NUM_MICRO_BATCHES, torch.device("cuda"))
    found: dict[str, dict[str, Any]] = {}
    for name, variant in VARIANTS.items():
        with cpu_platform():
            log = list(record(variant, work).log)
        launches, in_graphs = num_launches(log)
        steps = {us: play(log, device_model(BYTES_PER_S, args.link, us)).step_us / 1e3 for us in args.launch_us}
        found[name] = {"launches": launches, "kernels_in_graphs": in_graphs, "step_ms": steps}
    units = SIZE.num_layers * NUM_MICRO_BATCHES
    rows = [["variant", "launches", "in graphs", *(f"ms at {us:g} us" for us in args.launch_us)]]
    for name, one in found.items():
        per_layer = [f"{one[key] / units:.0f}" for key in ("launches", "kernels_in_graphs")]
        rows.append([name, *per_layer, *(f"{ms:.1f}" for ms in one["step_ms"].values())])
    print("per layer and micro-batch (embedding, head and loss included): launches; a step's modelled time")
    print(aligned(rows))
    write_result(args, {"link": str(args.link), "variants": found})


if __name__ == "__main__":
    run_command(main)
