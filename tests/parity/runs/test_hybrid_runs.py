"""Megatron's hybrid model in the real loop, with Transformer Engine's layers on a CPU: two ranks, EP=2."""

import pytest

from tests.ranks.pretraining import EP2, Run, pretrain

pytestmark = pytest.mark.distributed

COMPARED = ("lm loss", "grad norm", "load_balancing_loss", "z_loss")
STEPS, SAVED = 6, 3
HYBRID = (
    "--transformer-impl transformer_engine --hybrid-layer-pattern *E*-*E --is-hybrid-model "
    "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --disable-bias-linear --moe-grouped-gemm "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
).split()


@pytest.fixture(scope="module")
def stock(tmp_path_factory, token_data) -> tuple[Run, list[str]]:
    """Megatron's own run, and the flag that loads its checkpoint."""
    folder = tmp_path_factory.mktemp("stock")
    saves = ["--save", folder / "checkpoint", "--save-interval", SAVED]
    run = pretrain(token_data, [*EP2, *HYBRID, "--lancet-plan", "off", *saves], folder, train_iters=STEPS, te=True)
    return run, ["--load", folder / "checkpoint", "--ckpt-step", SAVED]


def test_hybrid_run_without_a_plan_is_megatrons(stock):
    run, _ = stock
    assert "megatron.core.models.hybrid.hybrid_block" in run.model_modules
    assert not any("lancet" in module for module in run.model_modules)


def test_hybrid_run_with_one_chunk_equals_stock_to_the_bit(stock, token_data, tmp_path):
    expected, _ = stock
    ours = pretrain(token_data, [*EP2, *HYBRID, "--lancet-num-chunks", 1], tmp_path, train_iters=STEPS, te=True)
    assert "megatron_lancet.features.hybrid.model" in ours.model_modules
    for name in COMPARED:
        assert ours.series(name) == expected.series(name), name


def test_hybrid_run_in_interleaved_pipeline_stages_equals_stock(token_data, tmp_path):
    stages = "--hybrid-layer-pattern *E|-E|*E|-* --pipeline-model-parallel-size 2 --global-batch-size 32".split()
    off, two = (
        pretrain(token_data, [*EP2, *HYBRID, *stages, *plan], tmp_path / plan[0], 4, train_iters=3, te=True)
        for plan in (["--lancet-plan", "off"], ["--lancet-num-chunks", 2])
    )
    assert "megatron_lancet.features.hybrid.model" in two.model_modules
    for name in ("lm loss", "grad norm"):
        assert two.series(name) == pytest.approx(off.series(name), rel=1e-5), name


def test_hybrid_run_with_two_chunks_continues_stocks_checkpoint(stock, token_data, tmp_path):
    expected, load = stock
    sequence = ["--lancet-num-chunks", 2, "--lancet-chunk-dim", "sequence"]
    ours = pretrain(token_data, [*EP2, *HYBRID, *sequence, *load], tmp_path, train_iters=STEPS, te=True)
    assert "chunks=2 dim=sequence" in ours.outputs[0]
    for name in ("lm loss", "grad norm"):  # stock, too, logs other auxiliary losses after it has resumed
        assert ours.series(name) == pytest.approx(expected.series(name)[SAVED:], rel=1e-5), name
