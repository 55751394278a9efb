"""A bound on received rows (``--lancet-max-expert-rows``) on eight workloads: rows that ranks work on, and time.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.parts.received_rows [--repeats 21] [--output FILE.json]

One MoE layer of Megatron in two chunks, forward and backward, with the workload's choice of experts in place of the
router's; the same weights and tokens with the bound and without it. The bound is a quarter above the even share of a
chunk. Outputs and gradients are compared before timing. The two take turns in random order; a step's time is the time
of the slower rank, and the ratio is the median of the paired ratios, above 1 where a step with the bound takes longer.

The workloads come from Megatron-LM's pull request 7488 (``benchmarks/moe/token_imbalance``, 2026-09-18), by its
description, with generators of our own: each token has top-k different experts; of E experts the hot ones are
max(top-k, E / 4), in W3 half of them, and three of four tokens choose among them only.

    W0  balanced             the experts in turn
    W1  hot expert set       the first experts are hot
    W2  hot rank             the hot experts are on one rank; with few ranks that is W1 with other random numbers
    W3  spread hot experts   every other expert is hot, so that every rank has as many
    W4  ragged sources       any experts; rank r has a share of the tokens in proportion to r + 1
    W5  idle experts         only experts of the upper half, so that half of the ranks get nothing
    W6  rotating hot spot    the hot experts change every three steps
    W7  burst                any experts; in every fourth step half of the tokens choose among the hot ones
"""

import statistics
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gradient_error import relative_error
from benchmarks.parts.frame import megatron_ranks, new_parser, paired_ratios, parsed, rounded, timed_pairs, write_result
from benchmarks.parts.moe_layer import Case, Input, MegatronLayer
from megatron_lancet.schedule.plan import OverlapRange, fixed_plan

CASE = Case(1024, 256, 1024, 8, 2)
"""Tokens are a rank's mean."""
PLAN = fixed_plan(2, overlap_range=OverlapRange.GATE)
ROOM = 1.25
"""The bound, over the even share of rows."""
TOLERANCE = 2e-5
"""Of outputs and gradients relative to their norm, fp32: only the order of sums differs."""
WORKLOADS = ("W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7")
WITHOUT, WITH = "without", "with"
_NUM_WARMUP = 3
_STEPS_OF_A_SPOT, _STEPS_OF_A_BURST = 3, 4
_MICRO_BATCH = 4


def candidates(workload: str, step: int, token: int, case: Case) -> list[int]:
    """The experts among which a token chooses."""
    everyone = list(range(case.experts))
    width = max(case.top_k, case.experts // 4)
    is_hot = token % 4 != 0
    match workload:
        case "W1" | "W2":
            return everyone[:width] if is_hot else everyone
        case "W3":
            return everyone[::2] if is_hot else everyone
        case "W5":
            return everyone[case.experts // 2 :]
        case "W6":
            first = step // _STEPS_OF_A_SPOT * width
            return [(first + expert) % case.experts for expert in range(width)] if is_hot else everyone
        case "W7":
            is_burst = step % _STEPS_OF_A_BURST == _STEPS_OF_A_BURST - 1 and token % 2 == 0
            return everyone[:width] if is_burst else everyone
        case _:
            return everyone


def routing_map(workload: str, step: int, tokens: int, rank: int, case: Case) -> torch.Tensor:
    """The experts of each token of a rank, [tokens, experts] bool."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + WORKLOADS.index(workload))
    chosen = torch.zeros(tokens, case.experts, dtype=torch.bool)
    for token in range(tokens):
        if workload == "W0":
            own = [(token * case.top_k + i) % case.experts for i in range(case.top_k)]
        else:
            among = candidates(workload, step, token, case)
            own = [among[i] for i in torch.randperm(len(among), generator=generator)[: case.top_k].tolist()]
        chosen[token, own] = True
    return chosen


def tokens_of(workload: str, rank: int, num_ranks: int, case: Case) -> int:
    """Tokens of a rank: a multiple of what chunks need."""
    if workload != "W4":
        return case.tokens
    share = 2 * (rank + 1) / (num_ranks + 1)
    multiple = _MICRO_BATCH * PLAN.num_chunks
    return max(multiple, int(case.tokens * share) // multiple * multiple)


class Workload:
    """A workload and the two layers that run it."""

    def __init__(self, name: str, layers: dict[str, MegatronLayer], num_steps: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        tokens = tokens_of(name, rank, ranks, CASE)
        self.input = Input(Case(tokens, CASE.hidden, CASE.ffn, CASE.experts, CASE.top_k))
        self._maps = [routing_map(name, step, tokens, rank, CASE) for step in range(num_steps)]
        self._layers = layers
        self._next = {variant: count() for variant in layers}
        self.peak_rows = dict.fromkeys(layers, 0)
        self.num_chunks = self.num_split = self.most_rounds = 0

    def begin(self, variant: str, step: int) -> None:
        """Lets the layer route the tokens of a step in the workload's way."""
        chosen = self._maps[step % len(self._maps)]
        num_chunks = PLAN.num_chunks
        # Tokens are numbered sample by sample. Chunks are samples, and their tokens lie position by position.
        by_position = chosen.view(_MICRO_BATCH, -1, CASE.experts).transpose(0, 1)
        parts = [part.reshape(-1, CASE.experts) for part in by_position.chunk(num_chunks, dim=1)]

        def forward(_: torch.Tensor, padding_mask: Any = None, chunk: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
            own = parts[chunk.index]
            return (own / CASE.top_k).requires_grad_(), own

        self._layers[variant]._moe.router.forward = forward

    def step_ms(self, variant: str) -> float:
        """Time of the variant's next step, on the slowest rank."""
        self.begin(variant, next(self._next[variant]))
        comm = self._layers[variant]._block.comm
        comm.stats.take()
        elapsed_ms = self.input.step_ms(self._layers[variant])
        times = comm.stats.take()
        self.peak_rows[variant] = max(self.peak_rows[variant], times.peak_expert_rows)
        if variant == WITH:
            self.num_chunks += times.num_chunks
            self.num_split += times.num_split_chunks
            self.most_rounds = max(self.most_rounds, times.most_rounds)
        return elapsed_ms

    def deviation(self) -> float:
        """Of the layer with the bound from that without: the largest of output and gradients."""
        results = {}
        for variant, layer in self._layers.items():
            self.begin(variant, 0)
            output, of_input, _, *of_experts = self.input.results(layer)  # the router has no gradient
            results[variant] = [output, of_input, *of_experts]
        pairs = zip(results[WITH], results[WITHOUT], strict=True)
        return max(relative_error(own, true) if true.any() else float(own.abs().max()) for own, true in pairs)


def measure(name: str, layers: dict[str, MegatronLayer], num_repeats: int) -> dict[str, Any]:
    """Compare and time a workload; what goes into the file, of the rank where it is most."""
    workload = Workload(name, layers, num_repeats)
    deviation = workload.deviation()
    if not deviation <= TOLERANCE:
        raise RuntimeError(f"{name} with the bound deviates by {deviation:.2g}, at most {TOLERANCE} was expected")
    samples = timed_pairs({variant: partial(workload.step_ms, variant) for variant in layers}, num_repeats)
    peaks = torch.tensor([workload.peak_rows[variant] for variant in (WITHOUT, WITH)])
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    ratio = paired_ratios(samples[WITH], samples[WITHOUT])
    return {
        "peak_rows": dict(zip((WITHOUT, WITH), peaks.tolist(), strict=True)),
        "split_chunks": workload.num_split,
        "chunks": workload.num_chunks,
        "most_rounds": workload.most_rounds,
        "median_ms": {variant: statistics.median(values) for variant, values in samples.items()},
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "deviation": deviation,
        "samples_ms": rounded(samples, 3),
    }


def show(name: str, found: dict[str, Any]) -> None:
    """Print a row of the table."""
    peaks, ms = found["peak_rows"], found["median_ms"]
    print(
        f"{name:4}{peaks[WITHOUT]:8}{peaks[WITH]:8}   {found['split_chunks']:4} of {found['chunks']:<6}"
        f"{found['most_rounds']:4}  {ms[WITHOUT]:10.1f}{ms[WITH]:10.1f}   "
        f"{found['ratio']:.3f} ({found['ratio_low']:.3f}-{found['ratio_high']:.3f})   {found['deviation']:.1e}",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = new_parser(__doc__, repeats=21)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS, help="rows of the table (all)")
    args = parsed(parser, "received_rows")
    with megatron_ranks():
        num_ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
        bound = int(ROOM * CASE.tokens * CASE.top_k / PLAN.num_chunks)
        layers = {variant: MegatronLayer(CASE, PLAN) for variant in (WITHOUT, WITH)}
        comm = layers[WITH]._block.comm
        comm.use(replace(comm.settings, max_expert_rows=bound))
        if is_first:
            print(f"{num_ranks} ranks, {CASE}, {PLAN.num_chunks} chunks, at most {bound} rows of a chunk on a rank\n")
            print(
                "     rows without, with   chunks in rounds, most   ms without, with   time with the bound   deviation"
            )
        warm_up = Workload("W0", layers, 1)
        for _ in range(_NUM_WARMUP):
            for variant in layers:
                warm_up.step_ms(variant)
        found: dict[str, Any] = {}
        for name in args.workloads:
            found[name] = measure(name, layers, args.repeats)
            if is_first:
                show(name, found[name])
    if is_first:
        facts = {"ranks": num_ranks, "threads": torch.get_num_threads(), "case": asdict(CASE), "bound": bound}
        write_result(args, {**facts, "chunks": PLAN.num_chunks, "workloads": found})


if __name__ == "__main__":
    main()
