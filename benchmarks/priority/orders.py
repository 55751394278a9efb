"""Orders of gradient reductions beside plans, by simulation: python -m benchmarks.priority.orders [--output FILE.json].

Neither torch, nor ranks, nor a link. Reductions run in the last micro-batch's backward only, which has no partner in a
paired step. So an order delays a step by the same time with and without pairs, however many micro-batches there are.
That delay is simulated for many layouts of gradients, and set against the step of each plan. Orders:

- ``ddp``: --overlap-grad-reduce. A bucket is reduced when it is complete, and shares the link with all-to-alls;
- ``lina``: in parts, between a layer's last dispatch and the next combine, with the best of three sizes of parts;
- ``gaps``: --lancet-comm-priority. In parts, after each all-to-all, with the best of these sizes;
- ``after``: all reductions follow the backward;
- ``bound``: all-to-alls pre-empt reductions, which get all other time of the link. The backward then ends as early as
  without reductions, and the link never rests while a bucket is complete: with the same order of compute no order of
  messages is faster. No library can send like this.

Each order has the better of two sizes of buckets: a layer, and all gradients.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product

from benchmarks.harness.tables import aligned
from benchmarks.parts.frame import new_parser, parsed, write_result
from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.patching import replaced
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.buckets import REDUCTION
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator, simulate
from megatron_lancet.schedule import reductions
from megatron_lancet.schedule.ops import FIRST_DISPATCHES, OpKind
from megatron_lancet.schedule.plan import Plan, fixed_plan, paired, plan_without_overlap
from megatron_lancet.schedule.reductions import CommPriority, GradientReduction
from megatron_lancet.schedule.timeline import Lane

NUM_LAYERS = 6
SHARES = (0.10, 0.25, 0.45, 0.65)
"""Parts of stock's step in which it waits for all-to-alls."""
MICRO_BATCHES = (1, 2, 4, 8)
OVERHEADS_MS = {"cheap": 0.1, "dear": 0.6}
"""By which each op of a chunk is longer; ops of a layer take 4 and 6 ms without chunks."""
PARTS = (0.25, 0.5, 1.0)
"""Of a layer's dense gradients, in a micro-op."""
ENDS = {"stock": plan_without_overlap(), "k1": fixed_plan(1), "k2": fixed_plan(2)}
"""By these the last micro-batch of a step runs."""
PLANS: dict[str, tuple[Plan, str]] = {
    **{name: (plan, name) for name, plan in ENDS.items()},
    "pairs": (paired(ENDS["k1"]), "k1"),
    "pairs, k2 at the ends": (paired(ENDS["k1"], ENDS["k2"]), "k2"),
    "pairs-k2": (paired(ENDS["k2"]), "k2"),
}
ROWS = {name: (name,) for name in ("stock", "k1", "k2", "pairs")} | {"fastest": tuple(PLANS)[1:]}
"""Plans of which each order has its fastest, by line of the table."""
WITH_CHUNKS = ("k2", "fastest")
ORDERS = ("ddp", "lina", "gaps", "after", "bound")
MUCH = 2.0
"""In percent of a step."""


@dataclass(frozen=True)
class Layout:
    """Gradients of a model and the ranks that sum them.

    Attributes:
        dense: bytes of a layer's dense weights in fp32, over the bytes of an all-to-all of a micro-batch: some 0.25 for
            long micro-batches, 1 in ``benchmarks.auto``, 3 for Mixtral 8x7B with 4096 tokens.
        is_bf16: reduced in bf16, else in fp32.
        ranks: that sum dense gradients, in a ring.
        expert_ranks: that sum gradients of the same experts, which have four times a layer's dense bytes.
    """

    dense: float
    is_bf16: bool
    ranks: int
    expert_ranks: int


LAYOUTS = [Layout(*values) for values in product((0.25, 1.0, 3.0), (False, True), (2, 64), (1, 2))]


@cache
def profile_without_gradients(share: float, overhead_ms: float, micro_batches: int = 1) -> Profile:
    """A profile whose stock step waits for a share of its time."""
    machine = Machine(
        layers="m" * NUM_LAYERS,
        chunk_counts=(1, 2),
        latency_ms=0.0,
        counts_ms=0.0,
        rest_ms=0.0,
        overhead_ms=overhead_ms,
        num_micro_batches=micro_batches,
    )
    compute_ms = step_ms(synthetic_profile(replace(machine, link_ms=0.0)), ENDS["stock"]) / micro_batches
    return synthetic_profile(replace(machine, link_ms=share / (1 - share) * compute_ms / (4 * NUM_LAYERS)))


def with_gradients(profile: Profile, layout: Layout, bucket_layers: int, is_free: bool = False) -> Profile:
    """The profile of a run that reduces these gradients; ``is_free`` if that takes no time."""
    message_bytes, message_ms = profile.link.all_to_all[1]
    dense_bytes = round(layout.dense * message_bytes / (2 if layout.is_bf16 else 1))
    weight_grads = tuple(
        replace(time, weight_bytes=dense_bytes * (4 if time.after == OpKind.EXPERTS else 1))
        for time in profile.weight_grads
    )
    reduced_ms = 2 * (layout.ranks - 1) / layout.ranks * dense_bytes / message_bytes * message_ms
    link = replace(profile.link, all_reduce=((0, 0.0), (dense_bytes, 0.0 if is_free else reduced_ms)))
    bucket_bytes = bucket_layers * dense_bytes
    rules = GradientReduction(layout.ranks, layout.expert_ranks, bucket_bytes=bucket_bytes)
    return replace(profile, weight_grads=weight_grads, link=link, gradients=rules)


def step_ms(profile: Profile, plan: Plan) -> float:
    """The predicted step."""
    return Simulator(CostModel(profile)).predict(plan).step_ms


def delays_ms(alone: Profile, plan: Plan, layout: Layout, bucket_layers: int) -> dict[str, float]:
    """By how much each order of reductions prolongs a step whose last micro-batch runs by ``plan``."""
    profile, alone_ms = with_gradients(alone, layout, bucket_layers), step_ms(alone, plan)
    rules = profile.gradients
    assert rules is not None
    layer_bytes = profile.link.all_reduce[1][0]
    sizes = [max(1, round(part * layer_bytes)) for part in PARTS]
    first = [replace(rules, priority=CommPriority.ALL_TO_ALL_FIRST, chunk_bytes=size) for size in sizes]
    in_parts = [replace(profile, gradients=one) for one in first]
    with replaced(reductions, "_BEFORE_PLACE", FIRST_DISPATCHES):
        lina_ms = min(step_ms(one, plan) for one in in_parts)
    (stage,) = Simulator(CostModel(profile)).stages(plan)
    assert stage.buckets is not None
    times_ms = {one.name: one.ms for one in stage.buckets.reductions}
    return {
        "ddp": step_ms(profile, plan) - alone_ms,
        "lina": lina_ms - alone_ms,
        "gaps": min(step_ms(one, plan) for one in in_parts) - alone_ms,
        "after": sum(times_ms.values()),
        "bound": _bound_ms(with_gradients(alone, layout, bucket_layers, is_free=True), plan, times_ms) - alone_ms,
    }


def _bound_ms(free: Profile, plan: Plan, times_ms: Mapping[str, float]) -> float:
    """The step whose reductions get the link only while no all-to-all is on it."""
    simulation = simulate(free, plan)
    messages = [span for span in simulation.timelines[0].spans if span.lane is Lane.COMM]
    ready = [(span.start_ms, times_ms[span.name]) for span in messages if span.name.startswith(REDUCTION)]
    busy = [(span.start_ms, span.end_ms) for span in messages if not span.name.startswith(REDUCTION)]
    return max(simulation.prediction.step_ms, filled_ms(ready, busy))


def filled_ms(ready: Sequence[tuple[float, float]], busy: Sequence[tuple[float, float]]) -> float:
    """The end of reductions that fill the gaps of a link, one after the other.

    Args:
        ready: when each is complete, and its time.
        busy: from when until when the link has something else to send; they may overlap.
    """
    now_ms = 0.0
    for start_ms, time_ms in sorted(ready):
        now_ms, left_ms = max(now_ms, start_ms), time_ms
        for from_ms, until_ms in sorted(busy):
            if now_ms + left_ms <= from_ms:
                break
            if until_ms > now_ms:
                left_ms -= max(0.0, from_ms - now_ms)
                now_ms = until_ms
        now_ms += left_ms
    return now_ms


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        chunks: how much longer ops of a chunk are, a key of :data:`OVERHEADS_MS`.
        share: for which stock waits.
        gains: by order, in percent of the step with ``ddp``: least and most of the layouts, and the number of those
            above :data:`MUCH`.
    """

    plan: str
    chunks: str
    share: float
    micro_batches: int
    gains: dict[str, tuple[float, float, int]]


def rows(chunks: str, share: float) -> Iterator[Row]:
    """The lines of the table for one machine."""
    overhead_ms = OVERHEADS_MS[chunks]
    alone = profile_without_gradients(share, overhead_ms)
    delays: dict[tuple[str, Layout], dict[str, float]] = {}
    for (ends, plan), layout in product(ENDS.items(), LAYOUTS):
        of_buckets = [delays_ms(alone, plan, layout, bucket_layers) for bucket_layers in (1, 1 << 20)]
        delays[ends, layout] = {order: min(one[order] for one in of_buckets) for order in ORDERS}
    for number, (name, plans) in product(MICRO_BATCHES, ROWS.items()):
        if chunks != "cheap" and name not in WITH_CHUNKS:
            continue  # as with cheap ones
        possible = [PLANS[one] for one in plans if number > 1 or not PLANS[one][0].is_paired]
        profile = profile_without_gradients(share, overhead_ms, number)
        steps = [(step_ms(profile, plan), ends) for plan, ends in possible]
        if steps:
            found = [
                {order: min(ms + delays[ends, layout][order] for ms, ends in steps) for order in ORDERS}
                for layout in LAYOUTS
            ]
            yield Row(name, chunks, share, number, {order: _gain(found, order) for order in ORDERS[1:]})


def _gain(steps_ms: Sequence[Mapping[str, float]], order: str) -> tuple[float, float, int]:
    gains = [round(100 * (1 - one[order] / one["ddp"]), 3) for one in steps_ms]
    return min(gains), max(gains), sum(gain > MUCH for gain in gains)


def table(found: Sequence[Row]) -> list[list[str]]:
    """The table, with its headings."""
    lines = [["plan", "chunks", "stock waits", "micro-batches", *ORDERS[1:]]]
    for row in found:
        gains = [f"{least:+.1f} to {most:+.1f} % ({number})" for least, most, number in row.gains.values()]
        lines.append([row.plan, row.chunks, f"{row.share:.0%}", str(row.micro_batches), *gains])
    return lines


def main() -> None:
    """Simulates and prints."""
    args = parsed(new_parser(__doc__), "benchmarks.priority.orders")
    found = [row for chunks, share in product(OVERHEADS_MS, SHARES) for row in rows(chunks, share)]
    found.sort(key=lambda row: (list(ROWS).index(row.plan), row.chunks))
    print(aligned(table(found)))
    write_result(args, {"num_layouts": len(LAYOUTS), "rows": [asdict(row) for row in found]})


if __name__ == "__main__":
    main()
