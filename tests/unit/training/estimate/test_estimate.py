"""Estimates of launches: ranges, what they depend on, and what they share with the dry run and the virtual GPU."""

import itertools
import os
import shlex
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.dry_run.run import examine
from megatron_lancet.lab.estimate import published
from megatron_lancet.lab.estimate.arguments import launch_us_of
from megatron_lancet.lab.estimate.candidates import STOCK, stock
from megatron_lancet.lab.estimate.cluster_text import ClusterChoice
from megatron_lancet.lab.estimate.command import estimate_launch, speeds_of
from megatron_lancet.lab.estimate.devices import Span, corners
from megatron_lancet.lab.estimate.estimate import Corner, Estimate, Estimator, bubble_of, rest_of_step
from megatron_lancet.lab.estimate.model_profile import facts_of
from megatron_lancet.lab.estimate.report import Estimated, as_plain, report
from megatron_lancet.lab.estimate.script import allowed_of, run_of
from megatron_lancet.lab.launch.launch import Launch, as_dry_run
from megatron_lancet.lab.what_if.forecast import Routing
from megatron_lancet.plan_words import plan_text
from megatron_lancet.planning.sizes.gpus import GPUS

LISTS = Path(__file__).parents[3] / "launch_args"
SMALL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 4 --global-batch-size 256 --num-experts 64 --moe-router-topk 4 --moe-ffn-hidden-size 512 "
    "--expert-model-parallel-size 16 --moe-token-dispatcher-type alltoall --swiglu --normalization RMSNorm "
    "--disable-bias-linear --bf16 --lr 1e-3 --train-iters 10 --eval-interval 10 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 32000 --attention-dropout 0 --hidden-dropout 0 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --position-embedding-type rope"
).split()
CLUSTER = "4x8:h100,nvlink,400g"
EVEN = Routing("even")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)


def launch(*more: object, words: list[str] = SMALL) -> Launch:
    return Launch([*words, *map(str, more)], None, {})


def estimated(*more: object, cluster: str = CLUSTER, routing: Routing = EVEN) -> Estimated:
    return estimate_launch(launch(*more), ClusterChoice.parse(cluster), routing)


def of_stock(*more: object, cluster: str = CLUSTER, routing: Routing = EVEN) -> Estimate:
    choice = ClusterChoice.parse(cluster)
    run = run_of(launch(*more), choice, routing)
    return Estimator(run, speeds_of(run, choice)).estimate(stock(allowed_of(run)))


@pytest.fixture(scope="module")
def whole() -> Estimated:
    return estimated()


def test_cluster_is_read_in_both_forms_of_a_link():
    found = ClusterChoice.parse("32x8:H100, nvlink, 400g")
    assert (found.num_ranks, found.ranks_per_node, found.gpu) == (256, 8, GPUS["h100"])
    assert (found.intra_gbps, found.inter_gbps) == (3600, 400)
    assert ClusterChoice.parse("1x4:a100,512,12.5g").intra_gbps == 512


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("32x8", "expects NODESxGPUS:GPU,INTRA,INTER"),
        ("0x8:h100,nvlink,400g", "expects NODESxGPUS:GPU,INTRA,INTER"),
        ("4x8:v100,nvlink,400g", "the GPU v100 is not known. Pass one of a100, h100, h200, b200."),
        ("4x8:h100,pcie,400g", "a link as nvlink or Gb/s such as 512g, got pcie"),
        ("4x8:h100,nvlink,0g", "a link as Gb/s of a GPU, such as 400g, got 0g"),
    ],
)
def test_wrong_clusters_are_refused_in_a_line(text, message):
    with pytest.raises(UsageError, match=message):
        ClusterChoice.parse(text)


@pytest.mark.parametrize(
    ("more", "cluster", "message"),
    [
        (["--expert-model-parallel-size", 1], CLUSTER, "--expert-model-parallel-size is 1"),
        (["--pipeline-model-parallel-size", 3], CLUSTER, "world size|divisible|multiple"),
        ([], "3x8:h100,nvlink,400g", "must divide the ranks of a pipeline stage; there are 24 ranks"),
    ],
)
def test_launches_without_an_answer_are_refused(more, cluster, message):
    with pytest.raises(UsageError, match=message):
        run_of(launch(*more), ClusterChoice.parse(cluster), EVEN)


def test_a_model_without_experts_is_refused():
    pairs = list(itertools.pairwise(SMALL))
    of_experts = ("--moe", "--num-experts", "--expert-model")
    words = [word for before, word in [("", SMALL[0]), *pairs] if not (before + word).startswith(of_experts)]
    words = [word for word in words if not word.startswith(of_experts)]
    with pytest.raises(UsageError, match="the model has no experts"):
        run_of(launch(words=words), ClusterChoice.parse(CLUSTER), EVEN)


def test_a_faster_network_makes_stock_faster_and_less_exposed():
    found = [of_stock(cluster=f"4x8:h100,nvlink,{gbps}g") for gbps in (100, 200, 400, 800)]
    for slow, fast in itertools.pairwise(found):
        for before, after in zip(slow.figures, fast.figures, strict=True):
            assert after.step_ms < before.step_ms
            assert after.exposed_share < before.exposed_share


def test_a_range_has_slow_and_fast_ends(whole):
    slow_host, fast_host = whole.found[0].figures[:4], whole.found[0].figures[4:]
    for slower, faster in zip(slow_host, fast_host, strict=True):
        assert slower.step_ms > faster.step_ms
    (slow, faster_link, faster_gpu, fast) = fast_host
    assert fast.step_ms < min(faster_link.step_ms, faster_gpu.step_ms)
    assert slow.step_ms > max(faster_link.step_ms, faster_gpu.step_ms)
    assert faster_link.exposed_share < slow.exposed_share < faster_gpu.exposed_share
    for one in whole.found:
        low, high = one.range_of("step_ms")
        assert 0 < low < high


def test_a_slow_host_makes_chunks_slower():
    def best_of(launch_us: float) -> dict[str, float]:
        found = estimate_launch(launch(), ClusterChoice.parse(CLUSTER), EVEN, Span(launch_us, launch_us)).found
        assert {len(one.figures) for one in found if one.figures} == {4}
        return {one.candidate.name: one.mean_step_ms for one in found}

    fast, slow = best_of(2.0), best_of(80.0)
    assert fast["two chunks"] < fast["one chunk"]
    assert slow["one chunk"] < slow["two chunks"] < slow["four chunks"]


def test_launch_times_without_effect_or_range_are_refused():
    graphs = launch("--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "attn", "--te-rng-tracker")
    with pytest.raises(UsageError, match="--launch-us has no effect with --cuda-graph-impl transformer_engine"):
        estimate_launch(graphs, ClusterChoice.parse(CLUSTER), EVEN, Span(9.0, 3.0))
    for low, high in ((9.0, 3.0), (0.0, 1.0), (1.0, float("inf"))):
        with pytest.raises(UsageError, match="--launch-us expects LOW and HIGH in us, 0 < LOW <= HIGH, got"):
            launch_us_of(Namespace(launch_us=[low, high]))


def test_uneven_routing_makes_stock_slower():
    for even, uneven in zip(of_stock().figures, of_stock(routing=Routing("zipf", 1.0)).figures, strict=True):
        assert uneven.step_ms > 1.05 * even.step_ms


def test_overlap_exposes_less_than_stock(whole):
    by_name = {one.candidate.name: one for one in whole.found}
    assert list(by_name)[:5] == [STOCK, "one chunk", "pairs", "two chunks", "four chunks"]
    assert [name.rpartition(", ")[2] for name in list(by_name)[5:]] == ["dedup", "two-hop"]
    before = by_name[STOCK]
    for name in ("one chunk", "pairs", "two chunks"):
        for old, new in zip(before.figures, by_name[name].figures, strict=True):
            assert new.exposed_ms < old.exposed_ms


def test_plans_are_those_of_their_flags(whole):
    for one in whole.found[1:]:
        flags = shlex.split(one.candidate.flags)
        words = replace(launch(*flags, "--lancet-world-size", 32, "--lancet-ranks-per-node", 8))
        with as_dry_run(words):
            assert examine().plan[0].startswith(plan_text(one.candidate.plan)), one.candidate.name


@pytest.mark.parametrize("name", ["megatron_mixtral_8x7b", "modelzoo_deepseek_v3_h100_128k"])
def test_memory_is_that_of_the_dry_run(name):
    words = shlex.split((LISTS / f"{name}.args").read_text())
    choice = ClusterChoice.parse("128x8:h100,nvlink,400g")
    run = run_of(launch(words=words), choice, EVEN)
    low, high = Estimator(run, speeds_of(run, choice)).estimate(stock(allowed_of(run))).memory
    with as_dry_run(launch("--lancet-world-size", 1024, "--lancet-plan", "off", words=words)):
        memory = examine().memory
    assert low == pytest.approx(max(stage.total for stage in memory))
    assert low < high < low + max(stage.activations for stage in memory)


def test_bubble_is_that_of_the_formula():
    assert bubble_of(1, 1, 7.0) == 0
    assert bubble_of(4, 1, 8.0) == 24
    assert bubble_of(4, 2, 8.0) == 12
    pipeline = ["--pipeline-model-parallel-size", 2, "--global-batch-size", 1024]
    one = of_stock(*pipeline)
    two = of_stock(*pipeline, "--num-virtual-stages-per-pipeline-rank", 2)
    longer = of_stock("--pipeline-model-parallel-size", 2, "--global-batch-size", 2048)
    for plain, virtual, more in zip(one.figures, two.figures, longer.figures, strict=True):
        assert virtual.bubble_ms == pytest.approx(plain.bubble_ms / 2, rel=0.1)
        assert more.step_ms - plain.step_ms == pytest.approx(1024 / 4 / 16 * plain.bubble_ms, rel=0.02)  # a slot each


def test_full_recompute_repeats_messages_of_stock_only():
    full = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1]
    choice = ClusterChoice.parse(CLUSTER)
    found = {}
    for name, more in (("kept", []), ("again", full)):
        run = run_of(launch(*more), choice, EVEN)
        corner = Corner(run, speeds_of(run, choice)[0])
        plan = stock(allowed_of(run)).plan
        found[name] = [corner.figures(plan, repeats).exposed_ms for repeats in (False, True)]
    assert found["kept"][0] == found["kept"][1]
    assert found["again"][1] == pytest.approx(1.5 * found["again"][0], rel=0.1)


def test_a_plan_keeps_received_rows_under_full_recompute():
    full = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1]
    by_name = {one.candidate.name: one for one in estimated(*full).found}
    rows = 4 * 2048 * 4 * 1024 * 2
    more = by_name["two chunks"].memory[0] - by_name[STOCK].memory[0]
    dws = max(one.peak_dw_bytes for one in by_name["two chunks"].figures)
    assert 7 * rows < more - dws < 12 * rows  # of 8 layers, with the router's input and scores


def test_gradients_and_weights_count_where_nothing_hides_them():
    words = [word for word in SMALL if word not in ("--overlap-grad-reduce", "--overlap-param-gather")]
    choice = ClusterChoice.parse(CLUSTER)
    shown, hidden = (run_of(launch(words=one), choice, EVEN) for one in (words, SMALL))
    speeds = next(corners(choice.gpu, choice.ranks_per_node, choice.intra_gbps, choice.inter_gbps))
    assert set(rest_of_step(hidden, speeds)) == {"optimizer"}
    rest = rest_of_step(shown, speeds)
    assert set(rest) == {"optimizer", "gradients", "weights"}
    assert rest["gradients"] == pytest.approx(rest["weights"] * 2, rel=0.1)  # of 4 and of 2 bytes


def test_what_a_run_can_not_have_is_named():
    found = estimated(
        "--micro-batch-size", 1, "--global-batch-size", 32, "--moe-router-topk", 1, "--moe-router-pre-softmax"
    )
    text = report(found)
    for reason in ("pairs: a step has one micro-batch", "dedup: a token has one expert (top-1)"):
        assert reason in text
    assert "--lancet-chunk-dim sequence" in as_plain(found)["plans"]["two chunks"]["flags"]


def test_a_dispatcher_that_sends_rows_once_counts_in_stock():
    found = estimated("--moe-token-dispatcher-type", "flex", "--moe-enable-deepep")
    assert found.found[0].candidate.plan.dispatch.name == "two-hop"
    assert "dispatch: two-hop, also in stock" in report(found)


def test_the_dispatch_of_the_script_is_not_stocks(whole):
    found = estimated("--lancet-dispatch", "two-hop")
    assert found.found[0].candidate == whole.found[0].candidate
    assert found.found[0].figures == whole.found[0].figures
    assert {str(one.candidate.plan.dispatch) for one in found.found[1:] if one.figures} == {"two-hop"}
    assert "also in stock" not in report(found)


SHORTCUT = (
    "--lancet-shortcut-moe --moe-layer-freq ([1,0]*4) --moe-shared-expert-intermediate-size 512 "
    "--moe-router-load-balancing-type aux_loss"
).split()


def test_sums_that_are_added_later_hide_messages_of_plans():
    wired, plain = estimated(*SHORTCUT), estimated(*SHORTCUT[1:])
    for late, soon in zip(wired.found[0].figures, plain.found[0].figures, strict=True):
        assert late == soon  # stock waits for each message
    for late, soon in zip(wired.found[1].figures, plain.found[1].figures, strict=True):
        assert late.exposed_ms < soon.exposed_ms


def test_a_script_without_possible_chunks_has_the_other_plans():
    found = estimated(*SHORTCUT, "--moe-input-jitter-eps", 0.01)
    reasons = {one.candidate.name: one.candidate.why_not for one in found.found}
    assert reasons["one chunk"] == ""
    assert reasons["two chunks"] == reasons["four chunks"] != ""


def test_rows_of_experts_that_return_them_are_not_sent():
    fewer = estimated(*SHORTCUT, "--lancet-identity-experts", 64)
    assert facts_of(fewer.run, 8).topk == 2
    assert "of the 4 rows of a token 2 are sent, others return it" in report(fewer)
    low, high = fewer.found[0].range_of("exposed_ms")
    assert high < estimated(*SHORTCUT).found[0].range_of("exposed_ms")[1]
    assert low > 0


def test_a_bin_is_a_micro_batch_of_one_sample():
    words = [word for word in SMALL if word != "--mock-data"] + ["--data-path", "/data/documents"]
    bins = ["--lancet-pack-documents", "--lancet-pack-max-tokens", 6144, "--calculate-per-token-loss"]
    found = estimate_launch(launch(*bins, words=words), ClusterChoice.parse(CLUSTER), EVEN)
    facts = facts_of(found.run, 8)
    assert (facts.micro_batch_size, facts.seq_length) == (1, 6144)
    assert "each micro-batch is one sample of 6144 positions" in report(found)


def test_padding_to_another_number_of_rows_is_refused():
    padded = ["--moe-pad-expert-input-to-capacity", "--moe-expert-capacity-factor"]
    assert facts_of(run_of(launch(*padded, 1.0), ClusterChoice.parse(CLUSTER), EVEN), 8).pads_to_capacity
    with pytest.raises(UsageError, match=r"--moe-expert-capacity-factor 1.5 can't be estimated: padding"):
        run_of(launch(*padded, 1.5), ClusterChoice.parse(CLUSTER), EVEN)


def test_report_has_ranges_assumptions_and_advice(whole):
    lines = report(whole).splitlines()
    assert lines[0].startswith("Megatron-Lancet estimate: 4 nodes x 8 H100, 3600 Gb/s")
    sections = [line for line in lines if not line.startswith("  ")]
    assert [line.partition(",")[0] for line in sections[1:]] == ["model", "layout", "plans", "assumptions", "try first"]
    assert lines[lines.index("try first") + 1].startswith("  pretrain_gpt_moe.py with --lancet-num-chunks")
    assert any(" to " in line and line.startswith("  stock") for line in lines)


def test_memory_that_is_too_small_is_named():
    found = estimated("--micro-batch-size", 32, "--num-layers", 64, "--global-batch-size", 2048)
    assert "memory does not fit a GPU of 75 GiB" in report(found)


def test_published_runs_are_predicted_with_their_conditions():
    found = [published.compare(one) for one in published.published_runs()]
    assert [one.published.speedup for one in found] == [1.177, 1.317, 1.28, 1.135]
    for one in found:
        assert one.published.source.startswith("https://")
        low, high = one.after.speedup(one.before)
        assert 1 < low < high < 2
    assert [one.verdict for one in found].count("below") == 3  # as reports say
    by_hybridep, by_alltoall = found[:2]
    for one in (by_hybridep, by_alltoall):
        low, high = one.before.range_of("step_ms")
        assert low < 1e3 * one.published.step_s < high
    # Plain rows need more of the network than a row for each node.
    assert by_alltoall.before.range_of("exposed_ms")[0] > by_hybridep.before.range_of("exposed_ms")[1]
    text = "\n".join(published.lines_of(found))
    assert "as predicted, published 37 %" in text
    assert sum(line.endswith(" %") and one.published.name in line for line in text.splitlines() for one in found) == 4


def test_nothing_of_the_launch_stays_behind(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["estimate"])
    before = dict(os.environ)
    run_of(Launch(list(SMALL), 8, {"SOME_VARIABLE": "1"}), ClusterChoice.parse(CLUSTER), EVEN)
    assert (sys.argv, dict(os.environ)) == (["estimate"], before)
