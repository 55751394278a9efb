"""Another expert-parallel size is a restart: a checkpoint goes on with another number of ranks, and back."""

import pytest

from tests.ranks.pretraining import EP2, pretrain

pytestmark = pytest.mark.distributed

EP1 = ["--expert-model-parallel-size", "1", "--lancet-separate-expert-grads"]
OVERLAP = ["--lancet-num-chunks", "2"]
NUM_ITERS, PACKED_AT, BACK_AT = 6, 2, 4
SAVE = ["--save-interval", PACKED_AT]
# Experts' gradients are summed up in another order: over a rank's tokens, or over replicas.
TOLERANCE = 1e-5


def test_losses_with_ep_resizes_equal_stock(token_data, tmp_path):
    def run(name, *flags):
        return pretrain(token_data, ["--disable-bias-linear", *flags], tmp_path / name, train_iters=NUM_ITERS)

    before, packed_up = tmp_path / "checkpoints", tmp_path / "packed-checkpoints"
    stock = run("stock", *EP2, "--lancet-plan", "off")
    whole = run("whole", *EP2, *OVERLAP, *SAVE, "--save", before, "--exit-interval", PACKED_AT)
    packed = run("packed", *EP1, "--load", before, "--exit-interval", BACK_AT, *SAVE, "--save", packed_up)
    back = run("back", *EP2, *OVERLAP, "--load", packed_up)
    for name in ("lm loss", "grad norm"):
        found = [part.series(name) for part in (whole, packed, back)]
        assert [len(part) for part in found] == [PACKED_AT, BACK_AT - PACKED_AT, NUM_ITERS - BACK_AT]
        assert [value for part in found for value in part] == pytest.approx(stock.series(name), rel=TOLERANCE)
        assert len(set(stock.series(name))) == NUM_ITERS
