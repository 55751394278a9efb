"""What the overlap is worth on one GPU: stock Megatron, pipelined experts, our schedules, Megatron's own overlap.

    python -m benchmarks.gpu --size gpt2-s-moe --output results.json

One process plays rank 0 of an expert-parallel group. Messages go through its memory and take the time that a link model
gives them, on a stream of their own; all else is Megatron's real model and step. A step is the forward and backward of
some micro-batches, without a reduction of gradients and without the optimizer. Before anything is timed, every
variant's gradients must be as close to stock's in fp32 as stock's own bf16 gradients are.

Exposed is the time during which a message is on its way and no kernel of the model runs: from the trace of
torch.profiler, in rounds of their own. On a CPU, where only the size "tiny" runs, it is the time spent waiting.
"""

import argparse
import json
import logging
import math
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measure import Measurement, Turns
from benchmarks.gpu.record import Recorder, read_records
from benchmarks.gpu.sizes import ON_CPU, SIZES
from benchmarks.gpu.table import found_in, summarise, table
from benchmarks.gpu.variants import PLANS, STOCK, Work
from benchmarks.gpu.world import mocked_group
from benchmarks.harness.origin import finished, origin
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.schedule.plan import ChunkDim
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_work import refuse_one_connection

_LINKS = {"tiny": ["100:0.01"]}
"""For which a tiny model's messages take as long as its compute."""
_DEFAULT_LINKS = ["10:50", "10:400"]
LIMITS = """
Speed-ups are upper bounds. One process with a modelled link can't show
- NCCL's kernels: a message copies its bytes once, on 16 SMs at the link's rate; NCCL also fills and drains buffers
- what the launch of a collective with many peers costs the host
- skew: all other ranks are exactly as fast as this one, and nobody waits for a slower one
- uneven ranks: this rank receives as many rows as it sends"""


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="gpt2-s-moe", help="the model (gpt2-s-moe)")
    parser.add_argument(
        "--link", nargs="+", metavar="LATENCY_US:GBYTES_PER_S", help="links of the mocked group (10:50 10:400)"
    )
    parser.add_argument("--ranks", type=int, default=8, help="of the mocked expert-parallel group (8)")
    parser.add_argument("--micro-batch", type=int, help="samples; by default the size's")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step; Megatron's own overlap needs two (2)")
    parser.add_argument("--variants", nargs="+", choices=PLANS, default=list(PLANS), help="where memory is short (all)")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each variant on each link (20)")
    parser.add_argument("--warmup", type=int, default=3, help="untimed ones before (3)")
    parser.add_argument("--traced", type=int, default=3, help="steps of each under the profiler, on a GPU (3)")
    parser.add_argument("--output", type=Path, help="JSON with every sample; FILE.jsonl next to it grows as it goes")
    return parser.parse_args(words)


def micro_batch_of(args: argparse.Namespace) -> int:
    """Samples of a micro-batch."""
    return SIZES[args.size].micro_batch if args.micro_batch is None else args.micro_batch


def check(args: argparse.Namespace) -> list[Link]:
    """The links to measure on.

    Raises:
        UsageError: what is asked for can't be run, or not on this machine.
    """
    if torch.cuda.device_count() == 0 and args.size != ON_CPU:
        raise UsageError(
            f"--size {args.size} needs a CUDA device, and torch {torch.__version__} finds none. Run it on a GPU, or "
            f"pass --size {ON_CPU}, which a CPU can run, though its times say nothing about a GPU."
        )
    if torch.cuda.device_count() > 0:
        refuse_one_connection()
    for flag, value, least in (
        ("--rounds", args.rounds, 2),
        ("--warmup", args.warmup, 1),
        ("--ranks", args.ranks, 2),
        ("--micro-batches", args.micro_batches, 1),
        ("--micro-batch", micro_batch_of(args), 1),
    ):
        if value < least:
            raise UsageError(f"{flag} {value}: expected at least {least}.")
    micro_batch = micro_batch_of(args)
    for name in args.variants:
        plan = PLANS[name]
        for segment in plan.segments if plan is not None else ():
            if segment.chunk_dim is ChunkDim.BATCH and segment.num_chunks > micro_batch:
                raise UsageError(
                    f"variant {name!r} cuts a micro-batch of {micro_batch} samples into {segment.num_chunks} chunks. "
                    f"Pass --micro-batch {segment.num_chunks} or more, or --variants without it."
                )
    try:
        links = [Link.parse(text) for text in args.link or _LINKS.get(args.size, _DEFAULT_LINKS)]
    except ValueError as error:
        raise UsageError(f"--link: {error}") from None
    if Link() in links:
        raise UsageError("--link 0:inf is free: nothing would be on its way, and nothing could be exposed.")
    return links


def run(work: Work, links: Sequence[Link], args: argparse.Namespace, record: Recorder) -> None:
    """Measures all variants on all links; the results are in the record."""
    with mocked_group(work.num_ranks) as using_link:
        turns = Turns(links, args.rounds, args.warmup, args.traced)
        Measurement(work, record, using_link).run(args.variants, turns)


def summaries(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Prints a table for each link; what goes into the file."""
    found = found_in(records)
    runs = []
    for link, samples in found.samples.items():
        rows = summarise(samples, STOCK)
        rounds = len(samples[STOCK].step_ms)
        print(
            f"\nlink {link}, speed-up against {STOCK}: median of {rounds} paired ratios\n{table(rows, found.skipped)}"
        )
        runs.append(
            {
                "link": link,
                "summary": {name: asdict(row) for name, row in rows.items()},
                "skipped": found.skipped,
                "samples": {name: asdict(one) for name, one in samples.items()},
            }
        )
    return runs


def main() -> None:
    """Measure, print, and write the file."""
    args = parse_arguments()
    links = check(args)
    started = None if args.output is None else origin("benchmarks.gpu")
    size = replace(SIZES[args.size], micro_batch=micro_batch_of(args))
    # Megatron tells of every package that it could use, and of every model that is built.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from megatron_lancet.training.platform.detect import platform

    with platform() as machine:
        on_gpu = machine.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(machine.device)
        work = Work(size, args.ranks, args.micro_batches, machine.device)
        where = {
            "device": torch.cuda.get_device_name(machine.device) if on_gpu else "CPU",
            "cuda": torch.version.cuda if on_gpu else None,
            "size": {"name": args.size, **asdict(size)},
            "ranks": args.ranks,
            "micro_batches": args.micro_batches,
        }
        print(f"{args.size} on {where['device']}, torch {torch.__version__}: rank 0 of a mocked group of {args.ranks}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "records.jsonl" if args.output is None else args.output.with_suffix(".jsonl")
            record = Recorder(path, limit_s=math.inf)
            run(work, links, args, record)
            records = read_records(path)
        runs = summaries(records)
        print(LIMITS)
    if started is not None:
        args.output.write_text(json.dumps({**finished(started), **where, "runs": runs}) + "\n")
    if record.num_errors:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
