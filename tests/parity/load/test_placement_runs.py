"""Experts on other ranks than stock's in the real loop: losses, and checkpoints that other placements and stock load.

One training in parts: under a placement from the start, under another one from a checkpoint, with its micro-batches
paired, and on stock modules to the end. Each part must go on as the uninterrupted run of stock does.
"""

import pytest
import torch

from megatron_lancet.planning.load.placement import placement_to_json
from tests.ranks.checkpoints import tensors_in
from tests.ranks.pretraining import EP2, pretrain

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

FLAGS = [
    *EP2,
    *"--num-experts 8 --swiglu --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable".split(),
    *"--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000 --save-interval 1".split(),
    *"--moe-router-score-function sigmoid --moe-router-enable-expert-bias --disable-bias-linear".split(),
]
ONE_CHUNK = ["--lancet-num-chunks", "1"]
FIRST = {1: (3, 1, 6, 5, 0, 2, 7, 4), 2: (7, 6, 5, 4, 3, 2, 1, 0)}
SECOND = {2: (0, 2, 4, 6, 1, 3, 5, 7)}
# Ranks sum the norms of other weights, so that clipping differs in the last bits.
TOLERANCE = 1e-5
COMPARED = ("lm loss", "grad norm")


@pytest.fixture(scope="module")
def runs(token_data, tmp_path_factory):
    """The four runs, by name, and the folders of their checkpoints."""
    root = tmp_path_factory.mktemp("placement")
    for name, layers in (("first", FIRST), ("second", SECOND)):
        (root / f"{name}.json").write_text(placement_to_json(layers))

    def run(name, *extra):
        return pretrain(token_data, [*FLAGS, *extra, "--save", root / name], root, train_iters=6)

    def placed(name):
        return [*ONE_CHUNK, "--lancet-expert-placement", root / f"{name}.json"]

    whole = run("whole", "--lancet-plan", "off")
    first = run("first", *placed("first"), "--exit-interval", 3)
    second = run("second", *placed("second"), "--lancet-pairing", "on", "--load", root / "first", "--exit-interval", 4)
    stock = run("stock", "--lancet-plan", "off", "--load", root / "second")
    return {"whole": whole, "first": first, "second": second, "stock": stock}, root


def test_losses_equal_stock_from_checkpoint_to_checkpoint(runs):
    found, _ = runs
    assert "experts of 2 layers are not in Megatron's order" in found["first"].outputs[0]
    assert "experts of 1 layer are not in Megatron's order" in found["second"].outputs[0]
    for name in COMPARED:
        series = [value for part in ("first", "second", "stock") for value in found[part].series(name)]
        assert series == pytest.approx(found["whole"].series(name), rel=TOLERANCE), name
    assert found["first"].series("lm loss")[0] == found["whole"].series("lm loss")[0]


@pytest.mark.parametrize(("part", "step"), [("first", 3), ("second", 4), ("stock", 6)])
def test_checkpoints_have_each_expert_under_its_own_number(runs, part, step):
    _, root = runs
    expected, found = (tensors_in(root / name / f"iter_{step:07d}") for name in ("whole", part))
    assert found.keys() == expected.keys()
    moments = [name for name in expected if "exp_avg" in name and "experts" in name]
    weights = [name for name in expected if name.startswith("decoder") and "experts" in name]
    assert moments
    assert weights
    for name, tensor in expected.items():
        # Adam divides by the root of small squares: near 0 a bit of the gradient moves the weight by more than a bit.
        assert torch.allclose(found[name].float(), tensor.float(), rtol=1e-4, atol=1e-6), name
    for name in weights:  # and this comparison tells experts apart
        assert not torch.allclose(found[name].flip(0), expected[name], rtol=1e-4, atol=1e-6)


def test_losses_of_a_placement_equal_stock_to_the_bit(token_data, tmp_path):
    """Two experts per token, one chunk, no clipping: all that is summed is summed in stock's order."""
    (tmp_path / "placement.json").write_text(placement_to_json({1: (3, 0, 2, 1), 2: (1, 3, 0, 2)}))
    flags = [*EP2, "--bf16", "--clip-grad", 0, "--disable-bias-linear"]
    stock = pretrain(token_data, [*flags, "--lancet-plan", "off"], tmp_path, train_iters=4)
    placed = [*flags, *ONE_CHUNK, "--lancet-expert-placement", tmp_path / "placement.json"]
    ours = pretrain(token_data, placed, tmp_path, train_iters=4)
    assert "experts of 2 layers are not in Megatron's order" in ours.outputs[0]
    assert ours.series("lm loss") == stock.series("lm loss")
