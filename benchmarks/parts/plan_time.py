"""How long planning and simulating take, on made-up profiles of 96 layers.

    python -m benchmarks.parts.plan_time [--layers 96] [--repeats 3] [--gradients] [--output FILE.json]

One core, no GPU, nothing of torch. For each case: the median time of make_plan with three ranges, two dimensions and 1,
2, 4 and 8 chunks, with and without a memory bound, and the time of one simulation of the whole step at 8 chunks. A
second table compares the search of large spaces with the whole search, on random small models.
"""

import random
import statistics
import time
from dataclasses import asdict, dataclass, replace

from benchmarks.parts.frame import new_parser, parsed, write_result
from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator, simulate
from megatron_lancet.schedule.plan import ChunkDim, OverlapRange, fixed_plan
from megatron_lancet.schedule.reductions import GradientReduction

LAYOUTS = {"all MoE": "m", "alternating dense and MoE": "dm"}
SHARES = {"symmetric": (0.5, 0.5), "2 ranks": (0.6, 0.4)}
LINKS_MS = (3.0, 12.0)
BYTES_PER_LAYER = 10_700_000
"""A memory bound between the needs of one and of four chunks."""


@dataclass(frozen=True)
class Case:
    """One profile and bound, and what was measured."""

    layers: str
    ranks: str
    link_ms: float
    has_memory_bound: bool
    plan_s: list[float]
    median_plan_s: float
    predict_8_chunks_ms: float
    simulate_8_chunks_ms: float
    num_simulated: int
    predicted_step_ms: float
    no_overlap_step_ms: float
    plan: str


REDUCTION_MS = 2.0
"""Of a weight's gradient, where gradients are reduced during the backward pass."""


def profile_of(layers: str, ranks: str, link_ms: float, with_gradients: bool) -> Profile:
    """The made-up profile of a case."""
    machine = Machine(layers=layers, shares=SHARES[ranks], link_ms=link_ms, dims=tuple(ChunkDim))
    profile = synthetic_profile(machine)
    if not with_gradients:
        return profile
    link = replace(profile.link, all_reduce=((0, 0.0), (machine.pinned_bytes, REDUCTION_MS)))
    gradients = GradientReduction(dense_ranks=2, bucket_bytes=4 * machine.pinned_bytes)
    return replace(profile, link=link, gradients=gradients)


def measure(
    layout: str, ranks: str, link_ms: float, has_memory_bound: bool, num_layers: int, repeats: int, gradients: bool
) -> Case:
    """Plan a model of ``num_layers`` layers ``repeats`` times."""
    pattern = LAYOUTS[layout]
    profile = profile_of((pattern * num_layers)[:num_layers], ranks, link_ms, gradients)
    limits = Limits(max_memory_bytes=BYTES_PER_LAYER * num_layers if has_memory_bound else None)
    plan_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        planned = make_plan(profile, limits)
        plan_s.append(round(time.perf_counter() - start_s, 3))
    simulator = Simulator(CostModel(profile))
    start_s = time.perf_counter()
    simulator.predict(fixed_plan(8))
    predicted_s = time.perf_counter()
    simulate(profile, fixed_plan(8))
    simulated_s = time.perf_counter()
    assert planned.no_overlap is not None
    return Case(
        layout,
        ranks,
        link_ms,
        has_memory_bound,
        plan_s,
        statistics.median(plan_s),
        round((predicted_s - start_s) * 1e3, 1),
        round((simulated_s - predicted_s) * 1e3, 1),
        planned.num_simulated,
        round(planned.prediction.step_ms, 3),
        round(planned.no_overlap.step_ms, 3),
        str(planned.plan),
    )


def compare_with_whole_search(num_models: int, seed: int = 0) -> list[float]:
    """Predicted step time after the search of a large space over that after a whole search, for random small models."""
    choose = random.Random(seed)  # noqa: S311 - no secrets
    limits = Limits(
        num_chunks=(1, 2, 4), chunk_dims=(ChunkDim.BATCH,), ranges=(OverlapRange.STACK, OverlapRange.EXPERTS)
    )
    ratios = []
    for _ in range(num_models):
        machine = Machine(
            layers="".join(choose.choice("md") for _ in range(choose.randint(1, 2))) + "m",
            link_ms=choose.uniform(0.5, 20),
            overhead_ms=choose.uniform(0, 0.5),
            shares=choose.choice([(0.5, 0.5), (0.7, 0.3)]),
        )
        scale = {op: ms * choose.uniform(0.2, 3) for op, ms in machine.op_ms.items()}
        profile = synthetic_profile(replace(machine, op_ms=scale))
        fast = make_plan(profile, limits, max_exhaustive=0).prediction.step_ms
        whole = make_plan(profile, limits, max_exhaustive=1000)
        assert whole.is_exact
        ratios.append(fast / whole.prediction.step_ms)
    return ratios


def main() -> None:
    """Measure and print."""
    parser = new_parser(__doc__)
    parser.add_argument("--layers", type=int, default=96, help="of the made-up models (96)")
    parser.add_argument("--repeats", type=int, default=3, help="searches of each case (3)")
    parser.add_argument("--gradients", action="store_true", help="gradients are reduced during the backward pass")
    parser.add_argument("--models", type=int, default=60, help="random models for the second table (60)")
    args = parsed(parser, "plan_time")
    cases = []
    print("layers                     ranks      link   bound  plan      8 chunks  in detail  predicted (no overlap)")
    for layout in LAYOUTS:
        for ranks in SHARES:
            for link_ms in LINKS_MS:
                for bound in (False, True):
                    case = measure(layout, ranks, link_ms, bound, args.layers, args.repeats, args.gradients)
                    cases.append(case)
                    print(
                        f"{layout:25}  {ranks:9}  {link_ms:4g}  {bound!s:5}  {case.median_plan_s:5.2f} s  "
                        f"{case.predict_8_chunks_ms:6.1f} ms  {case.simulate_8_chunks_ms:6.1f} ms  "
                        f"{case.predicted_step_ms:.0f} ms ({case.no_overlap_step_ms:.0f} ms)"
                    )
    ratios = compare_with_whole_search(args.models)
    exact = sum(ratio < 1 + 1e-9 for ratio in ratios)
    print(
        f"longest plan: {max(max(case.plan_s) for case in cases):.2f} s; against the whole search on {len(ratios)} "
        f"random models: {exact} equal, mean {statistics.mean(ratios):.4f}, worst {max(ratios):.4f}"
    )
    found = {
        "num_layers": args.layers,
        "cases": [asdict(case) for case in cases],
        "ratio_to_whole_search": [round(ratio, 6) for ratio in ratios],
    }
    write_result(args, found)


if __name__ == "__main__":
    main()
