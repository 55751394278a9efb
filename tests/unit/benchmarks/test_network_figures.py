"""From raw samples to the table: medians, ratios, bounds, disturbances."""

import dataclasses

import pytest
import torch

from benchmarks.harness.cases import Shape
from benchmarks.harness.rate import RateSearch
from benchmarks.harness.samples import Spread, spread
from benchmarks.network.cases import CASES
from benchmarks.network.picture import draw
from benchmarks.network.summary import summarise
from benchmarks.network.table import as_markdown, as_text
from benchmarks.training_step.routing import bias_for_shares, sent_rows
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP

FIELDS = {
    "step_ms": 100.0,
    "forward_ms": 40.0,
    "backward_ms": 60.0,
    "reduce_ms": 0.0,
    "optimizer_ms": 0.0,
    "exposed_forward_ms": 25.0,
    "exposed_backward_ms": 15.0,
    "counts_ms": 5.0,
    "cpu_ms": 50.0,
    "payload_bytes": 1e6,
    "reduced_bytes": 0.0,
}
OURS = {"step_ms": 60.0, "exposed_forward_ms": 3.0, "exposed_backward_ms": 1.0, "counts_ms": 0.5, "cpu_ms": 55.0}
FREE = {"step_ms": 52.0, "exposed_forward_ms": 0.5, "exposed_backward_ms": 0.5, "counts_ms": 0.0}


def both_ranks(**values) -> list[list[float]]:
    """A step in which rank 1 is slower by a tenth and waits less by 2 ms."""
    first = {**FIELDS, **values}
    slow = {name: first[name] * 1.1 for name in ("step_ms", "forward_ms", "backward_ms", "cpu_ms")}
    second = {**first, **slow, "exposed_forward_ms": first["exposed_forward_ms"] - 0.2}
    return [list(first.values()), list(second.values())]


def case_result(**overrides):
    """Two sweeps of three steps. The machine halves its speed in the third step: paired ratios don't notice."""

    def steps(**values) -> list[list[list[float]]]:
        slowed = {name: 2 * {**FIELDS, **values}[name] for name in ("step_ms", "forward_ms", "backward_ms")}
        return [both_ranks(**values), both_ranks(**values), both_ranks(**{**values, **slowed})]

    samples = {"stock": steps(), "all-k2": steps(**OURS), "stock-free": steps(**FREE)}
    sweep = {"samples": samples, "disturbance": {"is_disturbed": False}}
    case = dataclasses.replace(CASES["45"], variants=("stock", "all-k2", "stock-free"))
    return {
        **dataclasses.asdict(case),
        "rate_bps": 2e8,
        "expert_shares": [[0.25, 0.26, 0.24, 0.25]],
        "peak_activation_bytes": {"stock": [100, 90], "all-k2": [105, 110], "stock-free": [100, 100]},
        "sample_fields": list(FIELDS),
        "sweeps": [sweep, sweep],
        **overrides,
    }


def test_steps_are_the_slower_ranks_and_waits_the_mean():
    stock, ours, _ = summarise(case_result()).rows
    assert (stock.name, ours.name) == ("stock", "all-k2")
    assert ours.step_ms == pytest.approx(66)
    assert ours.forward_ms == pytest.approx(44)
    assert ours.exposed_ms == pytest.approx(3.9)
    assert ours.counts_ms == pytest.approx(0.5)


def test_variants_that_the_benchmark_no_longer_has_are_left_out():
    case = case_result()
    for sweep in case["sweeps"]:
        sweep["samples"]["of-old"] = sweep["samples"]["all-k2"]
    case["variants"] = ["stock", "of-old", "all-k2", "stock-free"]
    assert summarise(case) == summarise(case_result())


def test_the_cut_counts_both_waits():
    stock, ours, free = summarise(case_result()).rows
    assert ours.cut == pytest.approx(1 - 4.4 / 44.9)
    assert stock.cut is None
    assert free.cut is None


def test_ratios_are_of_the_same_repeat():
    ours = summarise(case_result()).rows[1]
    assert ours.speedup.median == pytest.approx(100 / 60)
    assert ours.speedup.high == pytest.approx(ours.speedup.low)
    assert ours.sweep_speedups == pytest.approx([100 / 60] * 2)
    assert ours.cpu_ratio == pytest.approx(1.1)
    assert ours.memory_ratio == pytest.approx(1.1)


def test_the_bound_is_compute_or_link_whichever_takes_longer():
    by_compute = summarise(case_result())
    assert by_compute.compute_ms == pytest.approx(55)
    assert by_compute.link_ms == pytest.approx(40)
    assert by_compute.rows[1].over_bound == pytest.approx(66 / 55)
    by_link = summarise(case_result(rate_bps=1e8))
    assert by_link.rows[1].bound_ms == pytest.approx(80)
    assert by_link.rows[2].over_bound is None


def test_each_pass_has_a_bound_of_its_own():
    """The forward takes two fifths of the compute and half of the link time."""
    forward_ms, backward_ms = 55 * 41.6 / 104.1, 55 * 62.5 / 104.1
    by_compute, by_both = summarise(case_result()), summarise(case_result(rate_bps=1.5e8))
    assert by_compute.rows[1].over_passes == pytest.approx(66 / 55)
    assert forward_ms < 80 / 3 < backward_ms  # half of what 1 MB takes at 150 Mbit/s
    assert by_both.rows[1].over_passes == pytest.approx(66 / (80 / 3 + backward_ms))
    assert by_both.rows[2].over_passes is None


def test_what_no_schedule_can_hide_is_said():
    by_compute, by_link = summarise(case_result()), summarise(case_result(rate_bps=1e8))
    assert by_compute.reachable_cut == 1
    assert by_link.reachable_cut == pytest.approx(1 - (80 - 55) / 44.9)
    assert "can be reached" not in as_text([by_compute])
    assert "a cut of 44% is all that can be reached" in as_text([by_link])


def test_gradient_reduction_takes_the_link_too():
    plain = case_result()
    for sweep in plain["sweeps"]:
        for repeats in sweep["samples"].values():
            for ranks in repeats:
                for rank in ranks:
                    rank[list(FIELDS).index("reduced_bytes")] = 3e6
    assert summarise(plain).link_ms == pytest.approx(160)


def test_passes_of_several_micro_batches_have_no_columns():
    case = case_result(shape={**dataclasses.asdict(CASES["45"].shape), "micro_batches": 2})
    ours = summarise(case).rows[1]
    assert (ours.forward_ms, ours.backward_ms, ours.over_passes) == (None, None, None)
    assert ours.over_bound == pytest.approx(66 / 55)
    (line,) = [line for line in as_text([summarise(case)]).splitlines() if line.lstrip().startswith("all-k2")]
    assert line.split()[1:] == "66 3.9 0.5 90.2% 1.20 1.100 1.10 1.667 (1.67-1.67) 1.67 1.67".split()


def test_steady_state_is_pair_over_bound_of_micro_batch():
    """Three pairs in 99 ms on the slower rank; the bound of four micro-batches is 55 ms."""
    case = case_result(shape={**dataclasses.asdict(CASES["45"].shape), "micro_batches": 4})
    assert summarise(case).rows[1].steady_over_bound is None, "older files lack the time of pairs"
    case["sample_fields"] = [*case["sample_fields"], "pairs_ms"]
    case["sweeps"] = case["sweeps"][:1]
    for repeats in case["sweeps"][0]["samples"].values():
        for ranks in repeats:
            for rank, pairs_ms in zip(ranks, (90.0, 99.0), strict=True):
                rank.append(pairs_ms)
    stock, ours, free = summarise(case).rows
    assert ours.steady_over_bound == pytest.approx((99 / 3) / (55 / 4))
    assert free.steady_over_bound is None
    assert stock.over_chunked is None
    assert "steady/bound" in as_text([summarise(case)])


def test_paired_variants_are_compared_with_all_k2():
    case = case_result()
    for sweep in case["sweeps"]:
        sweep["samples"]["paired-k1"] = [both_ranks(**{**OURS, "step_ms": step_ms}) for step_ms in (50, 50, 100)]
    case["variants"] = ("stock", "all-k2", "paired-k1", "stock-free")
    case["peak_activation_bytes"]["paired-k1"] = [114, 114]
    _, unpaired, paired, free = summarise(case).rows
    assert unpaired.over_chunked.median == 1
    assert paired.over_chunked.median == pytest.approx(60 / 50)
    assert free.over_chunked is None
    assert "against all-k2" in as_text([summarise(case)])
    assert "against all-k2" not in as_text([summarise(case_result())])


def test_placed_experts_are_compared_with_all_k2_and_even_ranks():
    case = case_result()
    for sweep in case["sweeps"]:
        sweep["samples"]["placed-k2"] = [both_ranks(**{**OURS, "step_ms": step_ms}) for step_ms in (50, 50, 100)]
    case["variants"] = ("stock", "all-k2", "stock-free", "placed-k2")
    case["peak_activation_bytes"]["placed-k2"] = [80, 80]
    case["expert_shares"], case["placements"] = [[0.5, 0.3, 0.1, 0.1]] * 2, [[0, 2, 1, 3]] * 2
    summary = summarise(case)
    placed = summary.rows[-1]
    assert summary.most_loaded == (pytest.approx(1.6), pytest.approx(1.2))
    assert placed.over_chunked.median == pytest.approx(60 / 50)
    assert (placed.bound_ms, placed.over_bound, placed.over_passes) == (None, None, None)
    assert "works on 1.60 times the mean of the ranks, with experts placed 1.20" in as_text([summary])
    assert summarise(case_result()).most_loaded is None


def test_shares_follow_zipfs_law():
    shares = Shape(experts=4, zipf=1.0).expert_shares()
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25])


def test_bytes_without_duplicates_are_compared_with_the_routing():
    case = case_result()
    assert "fewer bytes" not in as_text([summarise(case)])
    case["sample_fields"] = [*case["sample_fields"], "wire_bytes"]
    case["sent_rows"] = {"tokens": 3000, "plain": 6000, "dedup": 2970}
    case["sweeps"] = case["sweeps"][:1]
    sent = {"stock": (2e6, 4e6), "all-k2": (2e6, 4e6), "dedup-k2": (1e6, 2.04e6), "stock-free": (1e3, 1e3)}
    for sweep in case["sweeps"]:
        sweep["samples"] = {
            name: sweep["samples"].get(name) or [both_ranks(**{**OURS, "step_ms": ms}) for ms in (40, 40, 80)]
            for name in sent
        }
        for name, of_ranks in sent.items():
            for ranks in sweep["samples"][name]:
                for values, wire_bytes in zip(ranks, of_ranks, strict=True):
                    values[len(FIELDS) :] = [wire_bytes]
                    values[list(FIELDS).index("payload_bytes")] /= 2 if name == "dedup-k2" else 1
    case["variants"] = tuple(sent)
    case["peak_activation_bytes"]["dedup-k2"] = [107, 107]
    summary = summarise(case)
    stock, plain, dedup, free = summary.rows
    assert summary.sent_rows.two_hop is None
    assert dedup.fewer_rows == summary.sent_rows.fewer(DEDUP) == pytest.approx(2.0202, rel=1e-4)
    assert (stock.sent_bytes, stock.fewer_bytes, plain.fewer_bytes, free.sent_bytes) == (3e6, None, None, None)
    assert dedup.fewer_bytes == pytest.approx(3 / 1.52)
    assert (summary.gain.name, summary.gain.other) == ("dedup-k2", "all-k2")
    assert summary.gain.speedup.median == pytest.approx(60 / 40)
    case["rate_bps"] = 2e7
    stock, _, dedup, _ = summarise(case).rows
    assert stock.bound_ms == pytest.approx(2 * dedup.bound_ms), "half the bytes bound the step"
    text = as_text([summary])
    assert "1.974 (-2.3%)" in text
    assert "sends 2.00 rows to other ranks, 0.99 without duplicates: 2.020 times fewer" in text
    assert "dedup-k2, the fastest without duplicates, is 1.500 (1.50-1.50) times as fast as all-k2" in text


def test_a_token_with_several_experts_on_a_rank_is_counted_once():
    chosen = torch.tensor([[1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0], [1, 0, 1, 0, 0, 1]], dtype=torch.bool)
    assert sent_rows(chosen, rank=0, num_ranks=3).tolist() == [3, 6, 4, 4]
    assert sent_rows(chosen, rank=2, num_ranks=3).tolist() == [3, 6, 4, 4]
    assert sent_rows(chosen, rank=0, num_ranks=2).tolist() == [3, 4, 3, 3]


def test_token_with_two_experts_on_a_node_counts_once():
    chosen = torch.tensor([[1, 1, 1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 0, 1, 0]], dtype=torch.bool)
    for rank in (0, 1):
        assert sent_rows(chosen, rank, num_ranks=4, ranks_per_node=2).tolist() == [2, 4, 3, 2]
    for rank in (2, 3):
        assert sent_rows(chosen, rank, num_ranks=4, ranks_per_node=2).tolist() == [2, 3, 2, 1]


def nodes_result():
    """Two nodes of two ranks; ranks 0 and 2 share a core, and the first node sends a tenth more."""
    variants = ("stock", "all-k2", "stock-free", "dedup-k2", "two-hop-k2")
    case = case_result(**dataclasses.asdict(dataclasses.replace(CASES["nodes-top4"], variants=variants)))
    case["sample_fields"] = [*FIELDS, "wire_bytes"]
    case["sent_rows"] = {"tokens": 1000, "plain": 2000, "dedup": 1570, "two_hop": 990}
    case["peak_activation_bytes"] = {name: [100] * 4 for name in variants}
    steps = {
        "stock": {"payload_bytes": 1e6},
        "all-k2": {**OURS, "payload_bytes": 1e6},
        "stock-free": {**FREE, "payload_bytes": 1e6},
        "dedup-k2": {**OURS, "payload_bytes": 8e5, "step_ms": 55.0},
        "two-hop-k2": {**OURS, "payload_bytes": 5e5, "step_ms": 40.0},
    }
    by_variant = {}
    for name, values in steps.items():
        sent = 2 * values["payload_bytes"] * (0 if name == "stock-free" else 1)
        ranks = [{**FIELDS, **values, "cpu_ms": cpu_ms} for cpu_ms in (20.0, 30.0, 35.0, 24.0)]
        for rank in ranks[:2]:
            rank["payload_bytes"] *= 1.1
        nodes = [1.1 * sent, sent]
        by_variant[name] = [[[*rank.values(), nodes[place // 2]] for place, rank in enumerate(ranks)]] * 3
    case["sweeps"] = [{"samples": by_variant, "disturbance": {"is_disturbed": False}}]
    return case


def test_node_bytes_count_once_and_ranks_of_a_core_add_up():
    summary = summarise(nodes_result())
    stock, plain, free, dedup, two_hop = summary.rows
    assert summary.compute_ms == 20 + 35
    assert summary.link_ms == pytest.approx(2 * 1.1e6 * 8 / 2e8 * 1e3)
    assert stock.sent_bytes == pytest.approx((2.2e6 + 2e6) / 2)
    assert free.sent_bytes is None
    assert (plain.fewer_bytes, plain.fewer_rows) == (None, None)
    assert (dedup.fewer_bytes, dedup.fewer_rows) == (pytest.approx(1.25), pytest.approx(2000 / 1570))
    assert (two_hop.fewer_bytes, two_hop.fewer_rows) == (pytest.approx(2.0), pytest.approx(2000 / 990))
    assert two_hop.bound_ms == 55, "its bytes take 44 ms"
    assert stock.bound_ms == pytest.approx(88)


def test_two_hops_are_compared_with_the_fastest_without():
    summary = summarise(nodes_result())
    gain, two_hop = summary.gain, summary.rows[-1]
    assert (gain.name, gain.other, gain.dispatch) == ("two-hop-k2", "dedup-k2", TWO_HOP)
    assert gain.speedup.median == pytest.approx(55 / 40)
    assert two_hop.over_chunked.median == pytest.approx(60 / 40)
    text = as_text([summary])
    assert "a token sends 2.00 rows to other nodes, 1.57 if it goes once to a rank (1.274 times fewer)" in text
    assert "0.99 if it goes once to a node (2.020 times fewer)" in text
    assert "two-hop-k2, the fastest with two hops, is 1.375 (1.38-1.38) times as fast as dedup-k2, the fastest" in text
    assert "2.000 (-1.0%)" in text
    assert "against all-k2" in text


def test_few_values_have_their_range_for_quartiles():
    few, many = spread([3.0, 1.0, 2.0]), spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (few, few.ends) == (Spread(2.0, 1.0, 3.0), "range")
    assert (many, many.ends) == (Spread(3.0, 2.0, 4.0), "quartiles")
    assert "speedup (range)" in as_text([summarise(case_result(sweeps=case_result()["sweeps"][:1]))])
    assert "speedup (quartiles)" in as_text([summarise(case_result())])


def test_the_table_says_what_its_figures_refer_to():
    text = as_text([summarise(case_result())])
    assert "balanced top-1, stock exposes 45 %: 200 Mbit/s" in text
    assert "experts get 24.0% to 26.0% of the rows" in text
    assert "DISTURBED" not in text
    (line,) = [line for line in text.splitlines() if line.lstrip().startswith("all-k2")]
    assert line.split()[1:] == "66 44 66 3.9 0.5 90.2% 1.20 1.20 1.100 1.10 1.667 (1.67-1.67) 1.67 1.67".split()


def test_a_disturbed_sweep_is_marked_everywhere():
    result = case_result()
    result["sweeps"] = [result["sweeps"][0], {**result["sweeps"][1], "disturbance": {"is_disturbed": True}}]
    summary = summarise(result)
    assert summary.disturbed == [2]
    for text in (as_text([summary]), as_markdown([summary])):
        assert "DISTURBED: other work took the processor or memory during sweep 2" in text


def test_the_markdown_table_is_one():
    lines = as_markdown([summarise(case_result())]).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 3
    assert len({line.count("|") for line in table}) == 1
    assert "Compared: all-k2, stock-free against stock." in "\n".join(lines)


def test_a_reduction_has_a_column_of_its_own():
    result = case_result()
    place = list(FIELDS).index("reduce_ms")
    result["sweeps"][0]["samples"]["all-k2"][0][0][place] = 9.0
    assert "reduce+opt" not in as_text([summarise(result)]), "one step in six: the median has none"
    for sweep in result["sweeps"]:
        for ranks in sweep["samples"]["all-k2"]:
            ranks[0][place] = 9.0
    assert "reduce+opt" in as_text([summarise(result)])


def test_the_picture_is_drawn(tmp_path):
    draw([summarise(case_result()), summarise(case_result(name="other"))], tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("share", [0.2, 0.45, 0.65])
def test_the_rate_search_meets_the_share_on_a_link_that_behaves(share):
    compute_ms, skew_ms, payload_bytes = 900.0, 40.0, 17e6

    def stock(rate_bps: float) -> tuple[float, float]:
        exposed_ms = skew_ms + 1.2 * payload_bytes * 8 / rate_bps * 1e3  # some of it is not the wire
        return exposed_ms, compute_ms + exposed_ms

    search = RateSearch(share, compute_ms, skew_ms, payload_bytes)
    while search.correct(*stock(search.rate_bps)):
        pass
    exposed_ms, step_ms = stock(search.rate_bps)
    assert exposed_ms / step_ms == pytest.approx(share, abs=0.015)


def test_the_rate_stays_within_what_a_link_can_do():
    assert RateSearch(0.1, 100.0, 50.0, 1e6).rate_bps == 20e9
    assert RateSearch(0.9, 1e6, 0.0, 1e3).rate_bps == 5e6


@pytest.mark.parametrize(
    ("topk", "shares"), [(1, [0.25] * 4), (1, [0.4, 0.2, 0.2, 0.2]), (2, [0.25] * 4), (1, [0.5, 0.5])]
)
def test_the_bias_gives_each_expert_its_share_with_a_margin(topk, shares):
    generator = torch.Generator().manual_seed(3)
    uneven = torch.linspace(-0.5, 0.5, len(shares))
    scores = torch.sigmoid(0.5 * torch.randn(2048, len(shares), generator=generator) + uneven)
    biased = scores + bias_for_shares(scores, topk, shares)
    values, indices = biased.sort(dim=1, descending=True)
    got = torch.bincount(indices[:, :topk].flatten(), minlength=len(shares)) / (2048 * topk)
    assert got.tolist() == pytest.approx(shares, rel=0.011)
    assert (values[:, topk - 1] - values[:, topk]).min() > 1e-5, "rounding moves scores by 1e-7"
