"""Real trainings whose attention and routing are replayed from graphs: Megatron's loop, losses equal to stock's."""

import json

import pytest

from tests.parity.runs.test_losses_equal_stock import COMPARED
from tests.ranks.pretraining import EP2, Run, pretrain

pytestmark = pytest.mark.distributed

SETTINGS = [
    *EP2,
    *("--overlap-grad-reduce", "--ddp-bucket-size", 20000, "--use-distributed-optimizer", "--overlap-param-gather"),
    *("--eval-iters", 1, "--eval-interval", 3, "--moe-router-enable-expert-bias"),
    *("--moe-router-score-function", "sigmoid", "--no-create-attention-mask-in-dataloader"),
]
NUM_STEPS = 6
OURS = ["--lancet-cuda-graphs", "attention", "--cuda-graph-warmup-steps", 2]


@pytest.fixture(scope="module")
def stock(tmp_path_factory, token_data) -> Run:
    return pretrain(
        token_data, [*SETTINGS, "--lancet-plan", "off"], tmp_path_factory.mktemp("stock"), train_iters=NUM_STEPS
    )


@pytest.mark.parametrize(
    ("plan", "num_slots"), [(["--lancet-num-chunks", 1], 1), (["--lancet-num-chunks", 1, "--lancet-pairing", "on"], 2)]
)
def test_losses_with_graphs_equal_stocks_to_the_bit(stock, token_data, tmp_path, plan, num_slots):
    flags = [*SETTINGS, *plan, *OURS, "--lancet-report", tmp_path / "report"]
    run = pretrain(token_data, flags, tmp_path, train_iters=NUM_STEPS, LANCET_TEST_GRAPHS="1")
    for name in COMPARED:
        assert run.series(name) == stock.series(name), name
    output = run.outputs[0]
    assert "; attention and routing are captured in CUDA graphs" in output
    num_graphs = 2 * 2 * num_slots  # two layers, forward and backward
    assert output.count(f"Megatron-Lancet: captured {num_graphs} CUDA graphs in ") == 1
    assert f"CUDA graphs: {num_graphs} captured; 8 of 8 later micro-batches replayed" in output
    found = json.loads((tmp_path / "report/report.json").read_text())["cuda_graphs"]
    assert found["num_graphs"] == num_graphs
    assert (found["num_replayed_micro_batches"], found["num_eager_micro_batches"]) == (8, 0)
