"""CPU time of a step that is all Python, autograd and launches of ops: python -m benchmarks.host_time.

    OMP_NUM_THREADS=1 python -m benchmarks.host_time [--te] [--repeats 30] [--output FILE.json]

A model so small that its tensors cost nothing: 8 layers of hidden size 32, 16 experts as rank 0 of a mocked
expert-parallel group of 8, 4 micro-batches of 4 x 16 tokens, local layers in fp32, or with --te Transformer Engine's
own Python with plain torch for its kernels, whose time is in both sides of a ratio. Messages take no time. The variants
take turns in random order; a time is the CPU time of the process in one step. A ratio is the variant's time over
stock's in the same repeat: on a GPU the host must launch a step in less time than the device takes to run it.

"Stock in halves" has twice as many micro-batches with half the samples, so it runs each op twice, as two chunks
of whole layers do.

The second table divides the wall-clock time of one traced step among ops: a wait counts as long as it takes.
"""

import logging
import os
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import te_layers
from benchmarks.gpu.sizes import Size
from benchmarks.gpu.world import mocked_group
from benchmarks.harness.samples import spread
from benchmarks.harness.tables import aligned
from benchmarks.parts.frame import new_parser, parsed, rounded, timed_pairs, write_result
from megatron_lancet.errors import run_command
from megatron_lancet.patching import replaced
from megatron_lancet.schedule.plan import LocalTokens, OverlapRange, Plan, fixed_plan, paired
from megatron_lancet.schedule.timeline import Lane, RankTimeline

if TYPE_CHECKING:
    from benchmarks.gpu.variants import Runner

STOCK, HALVES, ANY_CORE = "stock", "stock in halves", "pairs on any core"
SIZE = Size(8, 32, 2, 2, 16, 64, 2, 2, 16, 4, 64, moe_every=1, modern=True)
NUM_RANKS, NUM_MICRO_BATCHES = 8, 4
_NUM_WARM_UP = 3


def plans() -> dict[str, Plan | None]:
    """The measured plans, by name; None for Megatron's own modules."""
    from megatron_lancet.features.dedup.order import DEDUP

    return {
        STOCK: None,
        "one chunk": fixed_plan(1),
        "pairs": paired(fixed_plan(1)),
        "two chunks": fixed_plan(2),
        "two chunks from the router": fixed_plan(2, overlap_range=OverlapRange.GATE),
        "two chunks of the experts": fixed_plan(2, overlap_range=OverlapRange.EXPERTS),
        "four chunks": fixed_plan(4),
        "two tiles": fixed_plan(1, tiles=2),
        "two tiles with local tokens": fixed_plan(1, tiles=2, local_tokens=LocalTokens.TILED),
        "dedup, one chunk": fixed_plan(1, dispatch=DEDUP),
    }


def cpu_ms(run: Callable[[], object]) -> float:
    """Milliseconds of CPU time that one call takes, on all threads of the process."""
    start_ns = time.process_time_ns()
    run()
    return (time.process_time_ns() - start_ns) / 1e6


def step_of(runner: "Runner") -> Callable[[], None]:
    """A step of a runner, from empty gradients on."""

    def step() -> None:
        runner.reset_gradients()
        runner.step()
        runner.take_times()

    return step


def on_any_core(step: Callable[[], None]) -> Callable[[], None]:
    """A step in pairs whose two threads share no core."""
    from megatron_lancet.features.pairing import core

    def run() -> None:
        with replaced(core, "_can_keep", lambda: False):
            step()

    return run


def ms_by_op(timeline: RankTimeline) -> dict[str, float]:
    """Time of a step by verb of its ops, ``F.`` forward and ``I.`` backward; dWs and waits are one line each.

    The rest is outside all ops: embedding, loss, autograd between ops, and the schedule of micro-batches.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for span in timeline.spans:
        if span.lane is Lane.COMPUTE:
            found[_verb(span.name)] += span.ms
        elif span.lane is Lane.WAIT:
            found["waits"] += span.ms
    found["outside ops"] = timeline.step_ms - sum(found.values())
    return dict(found)


def _verb(name: str) -> str:
    """``L1.c0.F.experts`` is ``F.experts``."""
    return "dW" if "W" in name.split(".") else ".".join(name.split(".")[-2:])


def traced(runner: "Runner", device: torch.device) -> RankTimeline:
    """A traced step of a variant that has a plan."""
    from megatron_lancet.training.observe.traced_steps import traced_step

    assert runner.setup is not None
    runner.reset_gradients()
    _, found = traced_step(runner.setup, device, runner.step)
    return found.timeline


def table_of_steps(samples: Mapping[str, Sequence[float]]) -> str:
    """CPU time of a step and its ratio to stock's, a line for each variant."""
    lines = [["plan", "CPU ms a step", "over stock's (quartiles)"]]
    for name, own in samples.items():
        ratio = spread([one / stock for one, stock in zip(own, samples[STOCK], strict=True)])
        text = f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
        lines.append([name, f"{statistics.median(own):.1f}", text])
    return aligned(lines)


def table_of_ops(by_variant: Mapping[str, Mapping[str, float]]) -> str:
    """Milliseconds of a step by op, a column for each variant."""
    verbs = sorted({verb for found in by_variant.values() for verb in found})
    lines = [["op", *by_variant]]
    lines += [[verb, *(f"{found.get(verb, 0.0):.1f}" for found in by_variant.values())] for verb in verbs]
    return aligned(lines)


def main() -> None:
    """Measure and print."""
    parser = new_parser(__doc__, repeats=30)
    parser.add_argument("--te", action="store_true", help="Transformer Engine's layers")
    args = parsed(parser, "benchmarks.host_time")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # Megatron's, of every model that is built
    if args.te:
        te_layers.check_unpacked("--te")
    device = torch.device("cpu")
    with te_layers.platform(args.te), mocked_group(NUM_RANKS):
        from benchmarks.gpu.variants import Runner, Variant, Work

        work = Work(SIZE, NUM_RANKS, NUM_MICRO_BATCHES, device, bf16=False, te=args.te)
        runners = {name: Runner(Variant(plan), work) for name, plan in plans().items()}
        half = replace(SIZE, micro_batch=SIZE.micro_batch // 2)
        halves = replace(work, size=half, num_micro_batches=2 * NUM_MICRO_BATCHES)
        runners[HALVES] = Runner(Variant(None), halves)
        steps = {name: step_of(runner) for name, runner in runners.items()}
        steps[ANY_CORE] = on_any_core(steps["pairs"])
        for step in steps.values():
            for _ in range(_NUM_WARM_UP):
                step()
        samples = timed_pairs({name: _timer(step) for name, step in steps.items()}, args.repeats)
        ops = {name: ms_by_op(traced(one, device)) for name, one in runners.items() if one.setup is not None}
    print(f"{table_of_steps(samples)}\n\nms of a traced step by op:\n{table_of_ops(ops)}")
    result: dict[str, Any] = {
        "size": asdict(SIZE),
        "te": args.te,
        "ranks": NUM_RANKS,
        "micro_batches": NUM_MICRO_BATCHES,
    }
    write_result(args, {**result, "samples_ms": rounded(samples, 3), "ops_ms": ops})


def _timer(step: Callable[[], None]) -> Callable[[], float]:
    return lambda: cpu_ms(step)


if __name__ == "__main__":
    run_command(main)
