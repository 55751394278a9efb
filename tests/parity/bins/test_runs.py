"""Documents in bins train as they do one by one: the real loop, two ranks, EP=2, losses of every step."""

import json
import re

import pytest

from tests import data
from tests.ranks.pretraining import EP2, pretrain

pytestmark = pytest.mark.distributed

NUM_ITERS, SAVED_AT = 4, 2
# Without balancing losses, which depend on how tokens are shared out to micro-batches.
FLAGS = (
    *(*EP2, "--moe-aux-loss-coeff", 0, "--moe-z-loss-coeff", 0, "--calculate-per-token-loss"),
    *("--eval-iters", 2, "--eval-interval", SAVED_AT),
)
BALANCED = ("--lancet-bins", "balanced", "--lancet-num-chunks", 2)
TOLERANCE = 1e-5
"""Of losses and norms: which samples are summed up together differs. About 5e-7 was measured."""
NAMES = ("lm loss", "grad norm")


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return data.write_short_documents(tmp_path_factory.mktemp("data") / "short_document")


@pytest.fixture(scope="module")
def one_by_one(documents, tmp_path_factory):
    """Each sample of at most 32 positions has a micro-batch of its own, in Megatron's own layers."""
    flags = [*FLAGS, "--lancet-bins", "first-fit", "--micro-batch-size", 1, "--lancet-plan", "off"]
    run = pretrain(documents, flags, tmp_path_factory.mktemp("one"), train_iters=NUM_ITERS)
    assert "do not fit" not in run.outputs[0]
    return run


@pytest.fixture(scope="module")
def in_balanced_bins(documents, tmp_path_factory):
    """The run, and its folder."""
    folder = tmp_path_factory.mktemp("balanced")
    saving = ["--save", folder / "checkpoints", "--save-interval", SAVED_AT, "--lancet-report", folder / "report"]
    return pretrain(documents, [*FLAGS, *BALANCED, *saving], folder, train_iters=NUM_ITERS), folder


def validation_losses(run):
    return [float(loss) for loss in re.findall(r"validation loss .*?lm loss value: ([-+.\dE]+)", run.outputs[-1])]


def assert_equal_losses(run, expected):
    for name in NAMES:
        assert len(run.series(name)) == NUM_ITERS
        assert run.series(name) == pytest.approx(expected.series(name), rel=TOLERANCE), name
    assert len(validation_losses(run)) == NUM_ITERS // SAVED_AT + 1
    assert validation_losses(run) == pytest.approx(validation_losses(expected), rel=TOLERANCE)


def test_losses_of_balanced_bins_are_those_of_single_documents(one_by_one, in_balanced_bins):
    assert_equal_losses(in_balanced_bins[0], one_by_one)


@pytest.mark.parametrize(("way", "plan"), [("first-fit", "--lancet-pairing on --lancet-num-chunks 1"), ("padded", "")])
def test_losses_of_other_bins_are_those_of_single_documents(one_by_one, documents, tmp_path, way, plan):
    flags = [*FLAGS, "--lancet-bins", way, *(plan or "--lancet-plan off").split()]
    assert_equal_losses(pretrain(documents, flags, tmp_path, train_iters=NUM_ITERS), one_by_one)


def test_resumed_run_goes_on_to_the_bit(in_balanced_bins, documents, tmp_path):
    whole, folder = in_balanced_bins
    going_on = ["--load", folder / "checkpoints", "--ckpt-step", SAVED_AT]
    resumed = pretrain(documents, [*FLAGS, *BALANCED, *going_on], tmp_path, train_iters=NUM_ITERS)
    for name in NAMES:
        assert resumed.series(name) == whole.series(name)[SAVED_AT:]


def test_report_counts_real_tokens(in_balanced_bins):
    run, folder = in_balanced_bins
    report = json.loads((folder / "report" / "report.json").read_text())
    bins = report["bins"]
    assert bins["mode"] == "balanced"
    assert bins["max_tokens"] == 32
    assert 0 <= bins["predicted_spread"] < 0.1
    assert 0 <= bins["padding"] < 0.1
    # The one step after the warm-up: positions of 16 documents of at most 32.
    (tokens,) = {rank["num_tokens"] for rank in report["ranks"]}
    assert 16 <= tokens < 16 * 32
    assert report["real_tokens_per_second"] == pytest.approx(tokens / report["ranks"][0]["step_ms"] * 1e3)
    assert "bins               balanced" in run.outputs[0]
