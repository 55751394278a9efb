"""The overlapping model trains like stock Megatron: the real loop, two ranks, EP=2, every iteration compared."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.ranks.pretraining import EP2, Run, pretrain

pytestmark = pytest.mark.distributed

NUM_ITERS = 8
COMPARED = ("lm loss", "grad norm", "load_balancing_loss", "z_loss")
SETTINGS = {
    # Two micro-batches a step; main gradients and reduction in fp32.
    "fp32": [],
    "fp32-distributed-optimizer": [
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--ddp-bucket-size",
        "20000",
    ],
    "bf16": ["--bf16"],
}
# fp32: chunks change the order in which a weight's gradient and the losses are summed up; about 2e-7 was measured.
# bf16: partial sums are rounded to 8 bits (so is the logged z-loss, in steps of 4e-3), and a routing decision near a
# tie may turn; 4e-4 in the loss and 8e-3 in the norm were measured over 20 steps.
TOLERANCE = {
    "fp32": dict.fromkeys(COMPARED, 1e-5),
    "bf16": {"lm loss": 2e-3, "grad norm": 3e-2, "load_balancing_loss": 2e-3, "z_loss": 8e-3},
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory, token_data):
    """Runs of stock Megatron, one per setting."""
    runs: dict[str, Run] = {}

    def run(setting: str) -> Run:
        if setting not in runs:
            folder = tmp_path_factory.mktemp(f"stock-{setting}")
            flags = [*EP2, *SETTINGS[setting], "--lancet-plan", "off"]
            runs[setting] = pretrain(token_data, flags, folder, train_iters=20 if setting == "fp32" else NUM_ITERS)
        return runs[setting]

    return run


@pytest.mark.parametrize(
    ("setting", "num_chunks"),
    [
        ("fp32", 1),
        ("fp32", 2),
        ("fp32-distributed-optimizer", 1),
        ("fp32-distributed-optimizer", 4),
        ("bf16", 1),
        ("bf16", 2),
    ],
)
def test_losses_equal_stock(stock, token_data, tmp_path, setting, num_chunks):
    expected = stock(setting)
    ours = pretrain(
        token_data, [*EP2, *SETTINGS[setting], "--lancet-num-chunks", num_chunks], tmp_path, train_iters=NUM_ITERS
    )
    assert f"chunks={num_chunks}" in ours.outputs[0]
    assert "megatron_lancet.model.transformer_block" in ours.model_modules
    assert len(ours.losses) == len(ours.logged) == NUM_ITERS
    for name in COMPARED:
        if num_chunks == 1:
            # The arithmetic is stock's, only later: not a bit may differ.
            assert ours.series(name) == expected.series(name)[:NUM_ITERS], name
        else:
            tolerance = TOLERANCE[setting.split("-")[0]][name]
            assert ours.series(name) == pytest.approx(expected.series(name)[:NUM_ITERS], rel=tolerance), name


def test_flex_sends_a_row_per_token_and_rank(stock, token_data, tmp_path):
    """One chunk, and two experts per token: sums of two, so not a bit may differ, whichever steps are traced."""
    flags = [*EP2, "--moe-token-dispatcher-type", "flex", "--lancet-num-chunks", 1, "--lancet-report", tmp_path]
    flags += ["--lancet-diagnose-interval", 2, "--tensorboard-dir", tmp_path / "events"]
    ours = pretrain(token_data, flags, tmp_path, train_iters=8)
    assert "flex runs as the plan's all-to-alls, one row per token and rank" in ours.outputs[0]
    assert "chunks=1 dim=batch range=stack dw=fill dw-window=2 dispatch=dedup" in ours.outputs[0]
    for name in COMPARED:
        assert ours.series(name) == stock("fp32").series(name)[:8], name
    check_causes(ours.outputs[0], tmp_path, [6, 8])  # step 4 is the one of the timeline


def check_causes(output, folder, steps):
    """Causes of waits of these traced steps are in the log, the report and TensorBoard, and sum to what was waited."""
    found = json.loads((folder / "report.json").read_text())["exposed_by_cause"]
    assert [one["step"] for one in found] == steps
    assert f"causes of step {steps[0]}: " in output
    assert f"exposed time by cause, traced step {steps[-1]}, mean over ranks" in output
    events = EventAccumulator(str(folder / "events")).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("lancet/exposed_by_cause/")]
    by_tag = {tag.rpartition("/")[2]: [event.value for event in events.Scalars(tag)] for tag in tags}
    assert set(by_tag) == {
        *("wire_ms", "rows_ms", "pace_ms", "token_counts_ms", "host_ms"),
        *("nothing_left_to_run_ms", "unexplained_ms"),
    }
    for index, one in enumerate(found):
        causes = one["causes"]
        assert 0 < causes["exposed_ms"] < causes["step_ms"]
        parts = [part["ms"] for part in causes["parts"].values()]
        total_ms = sum(parts) + causes["nothing_left_ms"] + causes["unexplained_ms"]
        assert total_ms == pytest.approx(causes["exposed_ms"])
        assert sum(values[index] for values in by_tag.values()) == pytest.approx(causes["exposed_ms"], rel=1e-3)


def test_each_flag_that_limits_the_plan(stock, token_data, tmp_path):
    """Each flag that limits the plan, with a value that is not its default."""
    limits = "--lancet-num-chunks 2 --lancet-attention sdpa --lancet-range gate --lancet-chunk-dim batch"
    limits += " --lancet-dispatch dedup --lancet-dw-policy none --lancet-max-expert-rows auto"
    flags = [*EP2, *limits.split(), "--lancet-report", tmp_path]
    ours = pretrain(token_data, flags, tmp_path, train_iters=4)
    assert "chunks=2 dim=batch range=gate dw=none dw-window=0 dispatch=dedup" in ours.outputs[0]
    assert "megatron_lancet.model.attention.sdpa" in ours.model_modules
    for name in COMPARED:
        assert ours.series(name) == pytest.approx(stock("fp32").series(name)[:4], rel=TOLERANCE["fp32"][name]), name
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["num_dw_in_gaps"] == report["num_dw_early"] == report["num_dw_late"] == 0
    # Measured behind the third step: this machine has room for any imbalance of so small a model.
    assert "received rows: no bound is needed, because all " in ours.outputs[0]
    assert (report["max_expert_rows"], report["num_split_chunks"]) == (None, 0)


def test_plan_off_runs_the_fused_attention_that_is_asked_for(stock, token_data, tmp_path):
    flags = [*EP2, "--lancet-plan", "off", "--lancet-attention", "sdpa"]
    fused = pretrain(token_data, flags, tmp_path, train_iters=4)
    assert "plan: off: stock Megatron modules with torch's fused attention" in fused.outputs[0]
    ours = {module for module in fused.model_modules if module.startswith("megatron_lancet")}
    assert ours == {"megatron_lancet.model.attention.sdpa"}
    for name in COMPARED:
        assert fused.series(name) == pytest.approx(stock("fp32").series(name)[:4], rel=TOLERANCE["fp32"][name]), name


def test_clipped_training_with_bounded_weight_grads(token_data, tmp_path):
    """Every step's norm is clipped, and the store is smaller than the plan's window would fill it."""
    both = [*EP2, "--clip-grad", "0.1", "--num-experts", "8", "--moe-grouped-gemm", "--disable-bias-linear"]
    expected = pretrain(token_data, [*both, "--lancet-plan", "off"], tmp_path / "stock", train_iters=6)
    bound = ["--lancet-dw-memory-mb", "0.1", "--lancet-max-expert-rows", "100", "--lancet-report", tmp_path]
    bound += ["--tensorboard-dir", tmp_path / "events"]
    ours = pretrain(token_data, [*both, *bound], tmp_path / "ours", train_iters=6)
    assert "megatron_lancet.model.local_experts.module" in ours.model_modules
    assert min(expected.series("grad norm")) > 0.1
    for name in COMPARED:
        assert ours.series(name) == pytest.approx(expected.series(name), rel=TOLERANCE["fp32"][name]), name
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["dw_memory_bytes"] == 100_000
    assert 0 < report["peak_dw_bytes"] <= 100_000
    assert report["num_dw_early"] > 0
    assert "deferred of 0.1 MB" in ours.outputs[0]
    assert 50 < report["peak_expert_rows"] <= report["max_expert_rows"] == 100
    assert 0 < report["num_split_chunks"] == report["num_chunks"]
    assert ours.outputs[0].count("Megatron-Lancet received rows: in step 1 ") == 1
    assert f"6 of 6 steps, went in up to {report['most_rounds']:.0f} rounds" in ours.outputs[0]
    events = EventAccumulator(str(tmp_path / "events")).Reload()  # Megatron's writer, in the real loop
    assert [event.value for event in events.Scalars("lm loss")] == pytest.approx(ours.series("lm loss"))
    ran_early = events.Scalars("lancet/num_dw_early")
    assert [event.step for event in ran_early] == [1, 2, 3, 4, 5, 6]
    assert sum(event.value for event in ran_early) >= report["num_dw_early"]  # the report leaves the first steps out


def test_losses_of_multi_token_prediction_equal_stock(token_data, tmp_path):
    both = [*EP2, *SETTINGS["fp32-distributed-optimizer"], "--mtp-num-layers", "2", "--mtp-use-repeated-layer"]
    both += ["--position-embedding-type", "rope"]
    expected = pretrain(token_data, [*both, "--lancet-plan", "off"], tmp_path / "stock", train_iters=5)
    ours = pretrain(token_data, [*both, "--lancet-num-chunks", "2"], tmp_path / "ours", train_iters=5)
    assert "megatron_lancet.features.mtp.model" in ours.model_modules
    for name in (*COMPARED, "mtp_1 loss", "mtp_2 loss"):
        assert ours.series(name) == pytest.approx(expected.series(name), rel=TOLERANCE["fp32"]["lm loss"]), name


def test_loss_falls_during_training(stock):
    losses = stock("fp32").series("lm loss")
    assert losses[-1] < losses[0] - 0.1


def test_plan_off_has_no_module_of_ours(stock):
    """What it trains is compared in test_spec: with a run of Megatron's own entry."""
    roots = {module.split(".")[0] for module in stock("fp32").model_modules}
    assert roots == {"megatron", "torch"}
