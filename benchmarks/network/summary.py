"""From raw samples to the figures of the table: medians, paired ratios, the lower bound. Plain Python."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.namespaces import NUM_NODES
from benchmarks.harness.samples import (
    CaseSamples,
    Ranks,
    Spread,
    all_exposed,
    by_node,
    disturbed_sweeps,
    mean,
    payload_exposed,
    slower,
    spread,
)
from benchmarks.network.cases import CHUNKED, VARIANTS
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.planning.load.placement import contiguous, rows_of_ranks
from megatron_lancet.planning.load.popularity import most_over_mean
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch


@dataclass(frozen=True)
class Row:
    """One variant in one case; medians over all sweeps.

    Attributes:
        step_ms: of the slower rank, like all passes.
        forward_ms: forward pass; None where a step has several micro-batches, whose passes may run side by side.
        backward_ms: backward pass, likewise.
        rest_ms: gradient reduction and optimizer.
        exposed_ms: time blocked in waits for payload, mean of the ranks.
        counts_ms: time blocked in count exchanges, mean of the ranks.
        cut: share of the reference's exposed time, counts included, that is gone. None for the reference itself, and
            on the free link, where only the ranks' skew is waited for.
        over_bound: step over its lower bound; None on the free link, where there is no such bound, and with placed
            experts, whose ranks compute and send other rows than the reference's.
        bound_ms: the lower bound: the larger one of compute and link time.
        over_passes: step over what the two passes take at least, one after the other, each bounded likewise by its own
            compute and link time: a backward pass can't carry the forward's rows. None also where the passes of several
            micro-batches may run side by side.
        steady_over_bound: time of a pair of a backward and the next forward in the middle of a step, over the bound of
            one micro-batch: what many micro-batches tend to. None on the free link, with one micro-batch, and in files
            of runs that did not take this time.
        cpu_ratio: CPU time over the reference's.
        memory_ratio: peak activation memory over the reference's, on the rank where it is larger.
        speedup: paired ratios of the reference's step to this one's.
        sweep_speedups: the median of each sweep.
        over_chunked: paired ratios of the step of :data:`CHUNKED` to this one's. None on the free link, for stock and
            where no variant with pairing, two hops, placed experts or tiles was run.
        sent_bytes: that left a node's shaped interface in a step, mean of the nodes. None on the free link, and in
            files of runs that did not count them in each step.
        fewer_bytes: the reference's bytes over this one's. None where a token travels once to each expert.
        fewer_rows: the same for the rows that the routing sends to other nodes.
    """

    name: str
    reference: str
    step_ms: float
    forward_ms: float | None
    backward_ms: float | None
    rest_ms: float
    exposed_ms: float
    exposed_forward_ms: float
    counts_ms: float
    cut: float | None
    over_bound: float | None
    bound_ms: float | None
    over_passes: float | None
    steady_over_bound: float | None
    cpu_ms: float
    cpu_ratio: float
    memory_ratio: float
    speedup: Spread
    sweep_speedups: list[float]
    over_chunked: Spread | None
    sent_bytes: float | None
    fewer_bytes: float | None
    fewer_rows: float | None


@dataclass(frozen=True)
class Gain:
    """The fastest variant with the dispatch that a case is about, against the fastest one of ours without.

    Attributes:
        dispatch: two hops, where any variant has them; else a token travels once to a rank.
        speedup: paired ratios of the latter's step to the former's.
    """

    name: str
    other: str
    dispatch: Dispatch
    speedup: Spread


@dataclass(frozen=True)
class SentRows:
    """Rows that leave a node in dispatches, for each token and layer, by the routing.

    Attributes:
        plain: one for each of the token's experts on other nodes.
        dedup: one for each rank of another node that has any of them.
        two_hop: one for each other node that has any of them; None where a node has one rank.
    """

    plain: float
    dedup: float
    two_hop: float | None

    def fewer(self, dispatch: Dispatch) -> float:
        """By what a dispatch divides the rows."""
        if dispatch == TWO_HOP:
            assert self.two_hop is not None
            return self.plain / self.two_hop
        return self.plain / self.dedup if dispatch == DEDUP else 1.0


@dataclass(frozen=True)
class CaseSummary:
    """One case.

    Attributes:
        exposed_share: of the baseline's step, counts included.
        compute_ms: CPU time of the baseline's step on the free link; of the rank that needs more, or where two ranks
            share a core, of the core.
        link_ms: time that a node's payload takes at the link's rate.
        reachable_cut: share of what the baseline exposes that its own compute can hide: where the link takes longer
            than compute, no schedule hides the rest.
        shares: smallest and largest share of the routed rows that an expert of any layer got.
        disturbed: numbers of the sweeps that something disturbed, from 1.
        sent_rows: what the routing sends; None where no variant deduplicates.
        gain: likewise.
        most_loaded: rows of the most loaded rank over the mean, mean over the layers: with Megatron's places and with
            the rows of variants that place experts; None without such a variant.
    """

    name: str
    title: str
    rate_bps: float
    exposed_share: float
    compute_ms: float
    link_ms: float
    reachable_cut: float
    shares: tuple[float, float]
    disturbed: list[int]
    rows: list[Row]
    sent_rows: SentRows | None
    gain: Gain | None
    most_loaded: tuple[float, float] | None = None


def summarise(case: Mapping[str, Any]) -> CaseSummary:
    """The table's figures of a case of the JSON file, without variants that the benchmark no longer has."""
    case = {**case, "variants": [name for name in case["variants"] if name in VARIANTS]}
    samples = CaseSamples(case)
    baseline = case["baseline"]
    flat_shares = [share for layer in case["expert_shares"] for share in layer]
    exposed_ms, step_ms = (samples.median(baseline, value) for value in (all_exposed, slower("step_ms")))
    compute_ms, link_ms = _compute_ms(samples, baseline), _link_ms(case, samples, baseline)
    return CaseSummary(
        name=case["name"],
        title=case["title"],
        rate_bps=case["rate_bps"],
        exposed_share=exposed_ms / step_ms,
        compute_ms=compute_ms,
        link_ms=link_ms,
        reachable_cut=1 - min(max(link_ms - compute_ms, 0.0) / exposed_ms, 1.0),
        shares=(min(flat_shares), max(flat_shares)),
        disturbed=disturbed_sweeps(case),
        rows=[_row(case, samples, name) for name in case["variants"]],
        sent_rows=_sent_rows(case),
        gain=_gain(case, samples),
        most_loaded=_most_loaded(case),
    )


def _most_loaded(case: Mapping[str, Any]) -> tuple[float, float] | None:
    placements = case.get("placements")  # older files lack it
    if not placements:
        return None
    num_ranks = NUM_NODES * _ranks_per_node(case)

    def mean_of(places: Sequence[Sequence[int]]) -> float:
        rows = [
            rows_of_ranks(shares, one, num_ranks) for shares, one in zip(case["expert_shares"], places, strict=True)
        ]
        return statistics.fmean(map(most_over_mean, rows))

    return mean_of([contiguous(len(shares)) for shares in case["expert_shares"]]), mean_of(placements)


def _ranks_per_node(case: Mapping[str, Any]) -> int:
    found: int = case.get("ranks_per_node", 1)  # older files lack it
    return found


def _dispatches(case: Mapping[str, Any]) -> set[Dispatch]:
    return {VARIANTS[name].dispatch for name in case["variants"]}


def _sent_rows(case: Mapping[str, Any]) -> SentRows | None:
    if _dispatches(case) == {PLAIN}:
        return None
    found = case["sent_rows"]
    has_hops = _ranks_per_node(case) > 1
    of_token = {name: number / found["tokens"] for name, number in found.items()}
    return SentRows(of_token["plain"], of_token["dedup"], of_token["two_hop"] if has_hops else None)


def _gain(case: Mapping[str, Any], samples: CaseSamples) -> Gain | None:
    dispatch = TWO_HOP if TWO_HOP in _dispatches(case) else DEDUP
    ours = [name for name in case["variants"] if VARIANTS[name].plan is not None and not VARIANTS[name].free_link]

    def fastest(has_dispatch: bool) -> str | None:
        names = [name for name in ours if (VARIANTS[name].dispatch is dispatch) == has_dispatch]
        return min(names, key=lambda name: samples.median(name, slower("step_ms")), default=None)

    name, other = fastest(True), fastest(False)
    if name is None or other is None:
        return None
    return Gain(name, other, dispatch, _spread_of(samples.speedups(name, other)))


def _compute_ms(samples: CaseSamples, variant: str) -> float:
    return samples.median(VARIANTS[variant].compute, _cpu_ms_of_core)


def _cpu_ms_of_core(ranks: Ranks) -> float:
    """Of the core that needs more; rank r is on core r modulo their number."""
    return max(sum(rank["cpu_ms"] for rank in ranks[core::NUM_NODES]) for core in range(NUM_NODES))


def _forward_share(samples: CaseSamples, variant: str) -> float:
    """Of the forward pass in both, without what was waited for."""
    forward, backward = (
        samples.median(variant, mean(f"{name}_ms")) - samples.median(variant, mean(f"exposed_{name}_ms"))
        for name in ("forward", "backward")
    )
    return forward / (forward + backward)


def _to_send(ranks_per_node: int) -> Callable[[Ranks], float]:
    """Bytes of the node that sends more."""
    return lambda ranks: max(
        sum(rank["payload_bytes"] + rank["reduced_bytes"] for rank in node) for node in by_node(ranks, ranks_per_node)
    )


def _link_ms(case: Mapping[str, Any], samples: CaseSamples, variant: str) -> float:
    return samples.median(variant, _to_send(_ranks_per_node(case))) * 8 / case["rate_bps"] * 1e3


def _row(case: Mapping[str, Any], samples: CaseSamples, name: str) -> Row:
    variant, rows = VARIANTS[name], _sent_rows(case)
    reference = variant.reference
    is_accumulated = case["shape"].get("micro_batches", 1) > 1
    own = {
        field: samples.median(name, slower(field))
        for field in ("step_ms", "forward_ms", "backward_ms", "reduce_ms", "optimizer_ms")
    }
    exposed_ms, reference_ms = (samples.median(which, all_exposed) for which in (name, reference))
    has_cut = name != reference and not variant.free_link
    bound_ms = passes_ms = None
    if not variant.free_link and not variant.is_placed:  # placed experts have no run of their own on the free link
        # What a message of ours has beyond the rows' own bytes is no part of the bound.
        sent_by = name if variant.is_deduplicated else reference
        compute_ms, link_ms = _compute_ms(samples, name), _link_ms(case, samples, sent_by)
        bound_ms = max(compute_ms, link_ms)
        # Each pass sends the same rows, once there and once back. With a reduction in the step, these two are not all;
        # with several micro-batches they need not come one after the other.
        if not case["optimizer"] and not is_accumulated:
            forward_ms = compute_ms * _forward_share(samples, variant.compute)
            passes_ms = max(forward_ms, link_ms / 2) + max(compute_ms - forward_ms, link_ms / 2)
    cpu_ms = samples.median(name, mean("cpu_ms"))
    peaks = case["peak_activation_bytes"]
    by_sweep = samples.speedups(name, reference)
    is_compared = variant.plan is not None and not variant.free_link and CHUNKED in case["variants"]
    compares = TWO_HOP in _dispatches(case) or any(
        VARIANTS[other].is_placed
        or VARIANTS[other].is_tiled
        or ((plan := VARIANTS[other].plan) is not None and plan.is_paired)
        for other in case["variants"]
    )
    return Row(
        name=name,
        reference=reference,
        step_ms=own["step_ms"],
        forward_ms=None if is_accumulated else own["forward_ms"],
        backward_ms=None if is_accumulated else own["backward_ms"],
        rest_ms=own["reduce_ms"] + own["optimizer_ms"],
        exposed_ms=samples.median(name, payload_exposed),
        exposed_forward_ms=samples.median(name, mean("exposed_forward_ms")),
        counts_ms=samples.median(name, mean("counts_ms")),
        cut=1 - exposed_ms / reference_ms if has_cut else None,
        over_bound=own["step_ms"] / bound_ms if bound_ms is not None else None,
        bound_ms=bound_ms,
        over_passes=own["step_ms"] / passes_ms if passes_ms is not None else None,
        steady_over_bound=_steady_over_bound(case, samples, name, bound_ms),
        cpu_ms=cpu_ms,
        cpu_ratio=cpu_ms / samples.median(reference, mean("cpu_ms")),
        memory_ratio=max(peaks[name]) / max(peaks[reference]),
        speedup=_spread_of(by_sweep),
        sweep_speedups=[statistics.median(sweep) for sweep in by_sweep],
        over_chunked=_spread_of(samples.speedups(name, CHUNKED)) if is_compared and compares else None,
        sent_bytes=None if variant.free_link else _sent_bytes(case, samples, name),
        fewer_bytes=_fewer_bytes(case, samples, name),
        fewer_rows=rows.fewer(variant.dispatch) if rows is not None and variant.is_deduplicated else None,
    )


def _sent_bytes(case: Mapping[str, Any], samples: CaseSamples, name: str) -> float | None:
    return samples.median(name, mean("wire_bytes")) if "wire_bytes" in case["sample_fields"] else None


def _fewer_bytes(case: Mapping[str, Any], samples: CaseSamples, name: str) -> float | None:
    if not VARIANTS[name].is_deduplicated:
        return None
    own, reference = (_sent_bytes(case, samples, which) for which in (name, VARIANTS[name].reference))
    return None if own is None or reference is None else reference / own


def _spread_of(by_sweep: Sequence[Sequence[float]]) -> Spread:
    return spread([ratio for sweep in by_sweep for ratio in sweep])


def _steady_over_bound(
    case: Mapping[str, Any], samples: CaseSamples, name: str, bound_ms: float | None
) -> float | None:
    num_micro_batches = case["shape"].get("micro_batches", 1)
    if bound_ms is None or num_micro_batches == 1 or "pairs_ms" not in case["sample_fields"]:
        return None
    pair_ms = samples.median(name, slower("pairs_ms")) / (num_micro_batches - 1)
    return pair_ms / (bound_ms / num_micro_batches)
