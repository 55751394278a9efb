"""Expert packing is a restart: a checkpoint goes on with another number of expert-parallel ranks, and back."""

import pytest

from tests.ranks.pretraining import EP2, pretrain

pytestmark = pytest.mark.distributed

EP1 = ["--expert-model-parallel-size", "1", "--lancet-experts-apart"]
OVERLAP = ["--lancet-num-chunks", "2"]
NUM_ITERS, PACKED_AT, BACK_AT = 6, 2, 4
SAVE = ["--save-interval", PACKED_AT]
# Experts' gradients are summed up in another order: over a rank's tokens, or over replicas.
TOLERANCE = 1e-5


def test_losses_after_ep_resize_equal_those_of_the_uninterrupted_run(token_data, tmp_path):
    flags = ["--disable-bias-linear"]
    folder = tmp_path / "checkpoints"
    whole = pretrain(
        token_data,
        [*flags, *EP2, *OVERLAP, *SAVE, "--save", folder],
        tmp_path / "whole",
        train_iters=NUM_ITERS,
    )
    packed = pretrain(
        token_data,
        [
            *(*flags, *EP1, "--load", folder, "--ckpt-step", PACKED_AT, "--exit-interval", BACK_AT),
            *(*SAVE, "--save", tmp_path / "packed-checkpoints"),
        ],
        tmp_path / "packed",
        train_iters=NUM_ITERS,
    )
    back = pretrain(
        token_data,
        [*flags, *EP2, *OVERLAP, "--load", tmp_path / "packed-checkpoints"],
        tmp_path / "back",
        train_iters=NUM_ITERS,
    )
    for name in ("lm loss", "grad norm"):
        found = whole.series(name)[:PACKED_AT] + packed.series(name) + back.series(name)
        assert found == pytest.approx(whole.series(name), rel=TOLERANCE)
