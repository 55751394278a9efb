"""Checkpoints are stock's: each side loads the other's, and a resumed run goes on to the bit."""

import pytest

from tests.ranks.pretraining import EP2, Run, pretrain

pytestmark = pytest.mark.distributed

NUM_ITERS, SAVED_AT = 6, 3
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
STOCK = ["--lancet-plan", "off"]
OURS = ["--lancet-num-chunks", "2"]
# As in test_losses_equal_stock.py: the order of sums.
TOLERANCE = 1e-5
SIDES = {
    "stock": STOCK,
    "ours": OURS,
    "ours-distributed-bf16": [*OURS, *DISTRIBUTED, "--bf16"],
    "stock-bf16": [*STOCK, "--bf16"],
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, token_data):
    """Runs of NUM_ITERS steps that save at SAVED_AT, by side; with the folder of their checkpoints."""
    runs: dict[str, tuple[Run, object]] = {}

    def run(side: str):
        if side not in runs:
            folder = tmp_path_factory.mktemp(f"undisturbed-{side}")
            extra = [*EP2, *SIDES[side], "--save-interval", SAVED_AT, "--save", folder / "checkpoints"]
            runs[side] = pretrain(token_data, extra, folder, train_iters=NUM_ITERS), folder / "checkpoints"
        return runs[side]

    return run


def resumed(token_data, checkpoints, side, folder) -> Run:
    extra = [*EP2, *SIDES[side], "--load", checkpoints, "--ckpt-step", SAVED_AT]
    run = pretrain(token_data, extra, folder, train_iters=NUM_ITERS)
    assert len(run.losses) == NUM_ITERS - SAVED_AT
    return run


@pytest.mark.parametrize(("saved", "loaded"), [("stock", "ours"), ("ours", "stock")])
def test_run_resumes_from_a_checkpoint_of_the_other_side(undisturbed, token_data, tmp_path, saved, loaded):
    expected, checkpoints = undisturbed(saved)
    run = resumed(token_data, checkpoints, loaded, tmp_path)
    for name in ("lm loss", "grad norm"):
        assert run.series(name) == pytest.approx(expected.series(name)[SAVED_AT:], rel=TOLERANCE)


@pytest.mark.parametrize("side", ["ours-distributed-bf16", "stock-bf16"])
def test_resumed_run_equals_uninterrupted_run_bitwise(undisturbed, token_data, tmp_path, side):
    """Also the proof of the optimizer's state: stock can't resume the distributed one without TE or apex."""
    expected, checkpoints = undisturbed(side)
    run = resumed(token_data, checkpoints, side, tmp_path)
    for name in ("lm loss", "grad norm"):
        assert run.series(name) == expected.series(name)[SAVED_AT:]
