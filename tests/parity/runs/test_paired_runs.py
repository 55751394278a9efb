"""Runs of plans with pairing equal stock's to the bit: the real loop, every iteration compared."""

import re

import pytest

from megatron_lancet.planning.plan_file import PlanFile, write_plan_file
from megatron_lancet.schedule.plan import DwPolicy, fixed_plan, paired
from tests.ranks.checkpoints import tensors_in
from tests.ranks.pretraining import EP2, Run, pretrain

pytestmark = pytest.mark.distributed

COMPARED = ("lm loss", "grad norm", "load_balancing_loss", "z_loss")
STOCK = ["--lancet-plan", "off"]
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
REDUCTIONS = ["--overlap-grad-reduce", "--ddp-bucket-size", "20000"]
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-param-gather", *REDUCTIONS]
FOUR_MICRO_BATCHES = ["--global-batch-size", "32"]
NUM_ITERS, SAVED_AT = 10, 5
# From one micro-batch to four, with evaluation in between.
LONG_RUN = [*EP2, *DISTRIBUTED, "--step-batch-size-schedule", "0:8 512:16 1536:24 3072:32"]  # from tokens on
LONG_RUN += ["--eval-iters", "2", "--eval-interval", "4", "--split", "8,2,0"]
LONG_RUN += ["--save-interval", str(SAVED_AT)]


@pytest.fixture(scope="module")
def by_plan(tmp_path_factory):
    """The flag of a plan file of one chunk with pairing."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    write_plan_file(path, PlanFile(paired(fixed_plan(1))))
    return ["--lancet-plan", path]


@pytest.fixture(scope="module")
def stock(token_data, tmp_path_factory):
    """A run of stock Megatron, and the folder of its checkpoints. On the CPU stock resumes no dropout to the bit."""
    folder = tmp_path_factory.mktemp("stock")
    saving = ["--save", folder / "saved"]
    return pretrain(token_data, [*LONG_RUN, *STOCK, *saving], folder, train_iters=NUM_ITERS), folder / "saved"


@pytest.fixture(scope="module")
def ours(token_data, tmp_path_factory, by_plan):
    """The same run with pairing."""
    folder = tmp_path_factory.mktemp("paired")
    saving = ["--save", folder / "saved"]
    return pretrain(token_data, [*LONG_RUN, *by_plan, *saving], folder, train_iters=NUM_ITERS), folder / "saved"


def validation_losses(run: Run) -> list[str]:
    """Megatron's lines with the losses of an evaluation."""
    return re.findall(r"validation loss at iteration \d+ [^\n]*", "\n".join(run.outputs))


def test_losses_equal_stock_while_the_batch_size_grows(stock, ours):
    (expected, _), (found, _) = stock, ours
    assert "paired" in found.outputs[0]
    assert "megatron_lancet.model.transformer_block" in found.model_modules
    assert {8, 16, 24, 32} == set(found.series("global batch size"))
    assert len(found.losses) == NUM_ITERS
    for name in COMPARED:
        assert found.series(name) == expected.series(name), name
    assert validation_losses(found) == validation_losses(expected)
    assert len(validation_losses(found)) >= NUM_ITERS / 4


def test_weights_in_checkpoints_equal_stock(stock, ours):
    """The optimizer's states have padding of any value between them: they show in the resumed run."""
    for iteration in (SAVED_AT, NUM_ITERS):
        expected, found = (tensors_in(folder / f"iter_{iteration:07}") for _, folder in (stock, ours))
        assert found.keys() == expected.keys()
        weights = [name for name in found if "optimizer" not in name]
        assert len(weights) > 10
        assert [name for name in weights if not found[name].equal(expected[name])] == []


def test_a_resumed_run_equals_the_uninterrupted_one_of_stock(stock, ours, by_plan, token_data, tmp_path):
    flags = [*LONG_RUN, *by_plan, "--load", ours[1], "--ckpt-step", SAVED_AT]
    resumed = pretrain(token_data, flags, tmp_path, train_iters=NUM_ITERS)
    for name in ("lm loss", "grad norm"):  # what stock logs of the other losses depends on evaluations before
        assert resumed.series(name) == stock[0].series(name)[SAVED_AT:], name


TENSOR = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-tensor-parallel-size", "1"]
STAGES = ["--pipeline-model-parallel-size", "2", "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"]
LAYOUTS = {
    "EP2xTP2, dropout": [*TENSOR, *DISTRIBUTED, *DROPOUT, "--global-batch-size", "16"],
    "EP2xPP2 interleaved, distributed optimizer": [*STAGES, *DISTRIBUTED, *DROPOUT],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_losses_in_layouts_equal_stock(token_data, tmp_path, by_plan, layout):
    flags = [*EP2, *FOUR_MICRO_BATCHES, "--disable-bias-linear", *layout]
    expected = pretrain(token_data, [*flags, *STOCK], tmp_path / "stock", 4, train_iters=4)
    found = pretrain(token_data, [*flags, *by_plan], tmp_path / "paired", 4, train_iters=4)
    assert "paired" in found.outputs[0]
    assert len(found.losses) == 4
    for name in COMPARED:
        assert found.series(name) == expected.series(name), name


def test_losses_with_chunks_at_the_ends_equal_stock(token_data, tmp_path):
    path = tmp_path / "plan.json"
    write_plan_file(path, PlanFile(paired(fixed_plan(1, DwPolicy.FILL), fixed_plan(2))))
    both = [*EP2, *FOUR_MICRO_BATCHES, *REDUCTIONS]
    expected = pretrain(token_data, [*both, *STOCK], tmp_path / "stock", train_iters=5)
    found = pretrain(token_data, [*both, "--lancet-plan", path], tmp_path / "paired", train_iters=5)
    assert "paired (at the ends chunks=2" in found.outputs[0]
    for name in COMPARED:
        assert found.series(name) == pytest.approx(expected.series(name), rel=1e-5), name
