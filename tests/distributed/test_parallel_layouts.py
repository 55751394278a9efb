"""Parallel layouts on the CPU: stock trains the same model in each, and the overlap works where it is offered."""

import pytest

from tests.distributed.pretraining import EP2, pretrain

pytestmark = pytest.mark.distributed

NUM_ITERS = 5
STOCK = ["--lancet-plan", "off"]
OVERLAP = ["--lancet-num-chunks", "2"]
TENSOR = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "20000"]
# Megatron's experts can't add a bias without expert parallelism.
NO_BIAS = ["--disable-bias-linear"]
# Layouts add partial sums in another order.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def first_step(tmp_path_factory, token_data):
    """A checkpoint of one rank's first step: layouts draw different weights, but can load the same."""
    folder = tmp_path_factory.mktemp("first-step")
    extra = [*STOCK, *NO_BIAS, "--save", folder / "checkpoints", "--save-interval", "1", "--no-save-optim"]
    pretrain(token_data, extra, folder, num_ranks=1, train_iters=1)
    return ["--load", folder / "checkpoints", "--no-load-optim", "--no-load-rng"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, token_data, first_step):
    """The reference: further steps on one rank."""
    extra = [*STOCK, *NO_BIAS, *first_step]
    return pretrain(token_data, extra, tmp_path_factory.mktemp("one-rank"), num_ranks=1, train_iters=NUM_ITERS)


@pytest.mark.parametrize("layout", [TENSOR, PIPELINE, EP2], ids=["tensor+sequence", "pipeline", "expert"])
def test_stock_trains_alike_in_all_layouts(one_rank, first_step, tmp_path, token_data, layout):
    run = pretrain(token_data, [*STOCK, *NO_BIAS, *first_step, *layout], tmp_path, 2, NUM_ITERS)
    assert len(run.losses) == NUM_ITERS - 1
    for name in ("lm loss", "grad norm"):
        assert run.series(name) == pytest.approx(one_rank.series(name), rel=TOLERANCE), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        [*EP2, *DISTRIBUTED],
        [*EP2, *PIPELINE, "--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2", "--overlap-grad-reduce"],
    ],
    ids=["EP2 x DP2", "EP2 x PP2 interleaved"],
)
def test_overlap_equals_stock_on_four_ranks(token_data, tmp_path, layout):
    stock = pretrain(token_data, [*STOCK, *layout], tmp_path / "stock", 4, NUM_ITERS)
    ours = pretrain(token_data, [*OVERLAP, *layout], tmp_path / "ours", 4, NUM_ITERS)
    assert "chunks=2" in ours.outputs[0]
    for name in ("lm loss", "grad norm", "load_balancing_loss", "z_loss"):
        assert ours.series(name) == pytest.approx(stock.series(name), rel=TOLERANCE), name


def test_experts_of_different_ranks_start_different(token_data, tmp_path):
    """Without a GPU, too, experts are drawn from Megatron's expert-parallel random state."""
    checkpoints = tmp_path / "checkpoints"
    extra = [*EP2, *STOCK, "--lr", "0", "--save", checkpoints, "--save-interval", "1", "--no-save-optim"]
    pretrain(token_data, extra, tmp_path, train_iters=1)
    experts = _expert_weights(checkpoints / "iter_0000001")
    assert len(experts) >= 1
    for name, weights in experts.items():
        for one in range(len(weights)):
            for other in range(one):
                assert not weights[one].equal(weights[other]), f"{name}: experts {other} and {one} start equal"


def _expert_weights(checkpoint):
    """Weights of all experts, [layers * experts, ...] per parameter name, read from a distributed checkpoint."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    reader = FileSystemReader(checkpoint)
    metadata = reader.read_metadata().state_dict_metadata
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if ".experts." in name and name.endswith("weight") and isinstance(entry, TensorStorageMetadata)
    }
    _load_state_dict(wanted, reader, no_dist=True)
    return {name: tensor.flatten(0, 1) for name, tensor in wanted.items()}
