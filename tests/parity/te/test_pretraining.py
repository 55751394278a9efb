"""The real training loop with Transformer Engine's layers on two CPU ranks: losses of every iteration against stock."""

import json

import pytest

from tests.ranks.pretraining import EP2, Run, pretrain

pytestmark = pytest.mark.distributed

TE = (
    "--transformer-impl transformer_engine --moe-grouped-gemm --disable-bias-linear --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ddp-bucket-size 20000"
).split()
SETTINGS = {
    "fp32": [],
    "bf16": ["--bf16"],
    "fp8": ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"],
}
COMPARED = ("lm loss", "grad norm", "load_balancing_loss", "z_loss")
TOLERANCE = 1e-5
"""As in ``test_losses_equal_stock``. Chunks in bf16 and fp8 are compared in ``test_gradients`` and ``test_fp8``."""
NUM_ITERS = 4


@pytest.fixture(scope="module")
def stock(tmp_path_factory, token_data):
    """Runs of stock Megatron, one per setting."""
    runs: dict[str, Run] = {}

    def run(setting: str) -> Run:
        if setting not in runs:
            flags = [*EP2, *TE, *SETTINGS[setting], "--lancet-plan", "off"]
            runs[setting] = pretrain(token_data, flags, tmp_path_factory.mktemp(setting), 2, NUM_ITERS, te=True)
        return runs[setting]

    return run


@pytest.mark.parametrize(("setting", "num_chunks"), [("fp32", 2), ("bf16", 1), ("fp8", 1)])
def test_te_losses_equal_stock(stock, token_data, tmp_path, setting, num_chunks):
    expected = stock(setting)
    flags = [*EP2, *TE, *SETTINGS[setting], "--lancet-num-chunks", num_chunks]
    ours = pretrain(token_data, flags, tmp_path, 2, NUM_ITERS, te=True)
    assert f"chunks={num_chunks}" in ours.outputs[0]
    assert "megatron_lancet.features.te.linear" in ours.model_modules
    assert len(ours.losses) == len(expected.losses) == NUM_ITERS
    for name in COMPARED:
        if num_chunks == 1:
            assert ours.series(name) == expected.series(name), name
        else:
            assert ours.series(name) == pytest.approx(expected.series(name), rel=TOLERANCE), name


def test_te_plan_off_has_no_module_of_ours(stock):
    roots = {module.split(".")[0] for module in stock("fp32").model_modules}
    assert roots == {"megatron", "torch", "transformer_engine"}


def test_te_losses_with_interleaved_pipeline_stages_equal_stock(token_data, tmp_path):
    layout = (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 "
        "--global-batch-size 32"
    ).split()
    flags = [*EP2, *TE, *layout]
    expected = pretrain(token_data, [*flags, "--lancet-plan", "off"], tmp_path / "stock", 4, 3, te=True)
    ours = pretrain(token_data, [*flags, "--lancet-num-chunks", "1"], tmp_path / "ours", 4, 3, te=True)
    assert "megatron_lancet.features.te.linear" in ours.model_modules
    assert ours.losses == expected.losses


@pytest.mark.nightly
def test_te_run_is_tuned(token_data, tmp_path):
    """It profiles, plans, and keeps or drops its plan; whatever it does, losses are stock's."""
    flags = [*EP2, *TE, "--lancet-tune-steps", "1", "--lancet-report", tmp_path, "--lancet-cache", tmp_path]
    ours = pretrain(token_data, flags, tmp_path, 2, 120, te=True, LANCET_TEST_SHORT_RACE="1")
    # As many steps are planned, so that both read the same samples.
    off = [*EP2, *TE, "--lancet-plan", "off", "--exit-interval", NUM_ITERS]
    expected = pretrain(token_data, off, tmp_path / "stock", 2, 120, te=True)
    said = [line for line in ours.outputs[0].splitlines() if line.startswith("Megatron-Lancet plan: ")]
    assert any("predicted" in line and "from a profile of" in line for line in said), said
    (profile,) = tmp_path.glob("profile-*.json")
    assert "transformer-engine" in json.loads(profile.read_text())["versions"]  # not for runs with local layers
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["tuning"]["stage"] == "watch"
    for name in COMPARED:
        assert ours.series(name)[:NUM_ITERS] == pytest.approx(expected.series(name), rel=1e-5), name
