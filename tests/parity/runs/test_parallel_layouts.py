"""Parallel layouts on the CPU: stock trains the same model in each, and the overlap works where it is offered."""

from collections.abc import Sequence

import pytest

from tests.ranks.pretraining import EP2, Run, pretrain

pytestmark = pytest.mark.distributed

NUM_ITERS = 5
STOCK = ["--lancet-plan", "off"]
OVERLAP = ["--lancet-num-chunks", "2"]
TENSOR = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]
CONTEXT = ["--context-parallel-size", "2"]
LARGER_BATCH = ["--global-batch-size", "32"]
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "20000"]
# Two virtual stages on two ranks; Megatron's experts can't add a bias without expert parallelism.
MODEL = ["--disable-bias-linear", "--num-layers", "4"]
# Layouts add partial sums in another order.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def first_step(tmp_path_factory, token_data):
    """A checkpoint of one rank's first step: layouts draw different weights, but can load the same."""
    folder = tmp_path_factory.mktemp("first-step")
    extra = [*STOCK, *MODEL, "--save", folder / "checkpoints", "--save-interval", "1", "--no-save-optim"]
    pretrain(token_data, extra, folder, num_ranks=1, train_iters=1)
    return ["--load", folder / "checkpoints", "--no-load-optim", "--no-load-rng"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, token_data, first_step):
    """The reference: further steps of stock Megatron on one rank, for a global batch size."""
    runs: dict[str, Run] = {}

    def run(batch: Sequence[str] = ()) -> Run:
        key = " ".join(batch)
        if key not in runs:
            folder = tmp_path_factory.mktemp("one-rank")
            runs[key] = pretrain(token_data, [*STOCK, *MODEL, *first_step, *batch], folder, 1, NUM_ITERS)
        return runs[key]

    return run


@pytest.mark.parametrize(
    "layout", [TENSOR, PIPELINE, EP2, CONTEXT], ids=["tensor+sequence", "pipeline", "expert", "context"]
)
def test_stock_losses_are_alike_in_all_layouts(one_rank, first_step, tmp_path, token_data, layout):
    run = pretrain(token_data, [*STOCK, *MODEL, *first_step, *layout], tmp_path, 2, NUM_ITERS)
    assert len(run.losses) == NUM_ITERS - 1
    for name in ("lm loss", "grad norm"):
        assert run.series(name) == pytest.approx(one_rank().series(name), rel=TOLERANCE), name


OVERLAPPING = {
    # One micro-batch per step.
    "EP4": ["--expert-model-parallel-size", "4"],
    "EP2xDP2": [*EP2, *DISTRIBUTED],
    # Two.
    "EP2xTP2": [*EP2, *TENSOR, "--expert-tensor-parallel-size", "1", *DISTRIBUTED],
    "EP2xETP2": [*EP2, *TENSOR],
    # Four.
    "EP2xPP2": [*EP2, *PIPELINE, "--overlap-grad-reduce"],
    "EP2xPP2 interleaved": [*EP2, *PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2", "--overlap-grad-reduce"],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", OVERLAPPING.values(), ids=OVERLAPPING.keys())
def test_losses_with_overlap_equal_stock_on_one_rank(one_rank, first_step, token_data, tmp_path, layout):
    batch = LARGER_BATCH if layout[2:4] == PIPELINE else []
    ours = pretrain(token_data, [*OVERLAP, *MODEL, *first_step, *layout, *batch], tmp_path, 4, NUM_ITERS)
    assert "chunks=2" in ours.outputs[0]
    assert "megatron_lancet.model.transformer_block" in ours.model_modules
    for name in ("lm loss", "grad norm", "load_balancing_loss", "z_loss"):
        assert ours.series(name) == pytest.approx(one_rank(batch).series(name), rel=TOLERANCE), name


def test_losses_of_two_hops_equal_those_of_stock_that_goes_on_from_their_checkpoint(token_data, tmp_path):
    """Two nodes of two ranks on this machine, one expert on each rank; sums of two, so not a bit may differ."""
    both = ["--expert-model-parallel-size", "4"]
    hops = ["--moe-token-dispatcher-type", "flex", "--lancet-ranks-per-node", 2, "--lancet-num-chunks", 1]
    saving = ["--save", tmp_path / "checkpoints", "--save-interval", 2]
    ours = pretrain(token_data, [*both, *hops, *saving], tmp_path / "ours", 4, NUM_ITERS)
    assert "flex runs as the plan's all-to-alls, one row per token and node" in ours.outputs[0]
    assert "dw-window=4 dispatch=two-hop; two hops over 2 nodes x 2 ranks" in ours.outputs[0]
    loading = ["--load", tmp_path / "checkpoints", "--ckpt-step", 2]
    expected = pretrain(token_data, [*both, *STOCK, *loading], tmp_path / "stock", 4, NUM_ITERS)
    assert len(expected.losses) == NUM_ITERS - 2
    assert ours.losses[2:] == expected.losses


def test_losses_of_one_chunk_equal_stock_bitwise_with_interleaved_pipeline_stages_and_mtp(token_data, tmp_path):
    # The last virtual stage has no layer beside the multi-token prediction.
    stages = ["--pipeline-model-parallel-layout", "Et|t|tt|mL", "--mtp-num-layers", "1"]
    positions = ["--position-embedding-type", "rope"]
    layout = [*MODEL, *EP2, *PIPELINE, *stages, *positions, "--overlap-grad-reduce", *LARGER_BATCH]
    expected = pretrain(token_data, [*STOCK, *layout], tmp_path / "stock", 4, train_iters=3)
    ours = pretrain(token_data, ["--lancet-num-chunks", "1", *layout], tmp_path / "ours", 4, train_iters=3)
    assert "megatron_lancet.model.transformer_block" in ours.model_modules
    assert len(ours.losses) == 3
    assert ours.losses == expected.losses
    assert ours.series("mtp_1 loss") == expected.series("mtp_1 loss")


def test_losses_with_context_parallelism_equal_stock_without(one_rank, first_step, token_data, tmp_path):
    layout = [*EP2, *CONTEXT, *DISTRIBUTED]
    ours = pretrain(token_data, [*OVERLAP, *MODEL, *first_step, *layout], tmp_path, 2, NUM_ITERS)
    assert "chunks=2 dim=batch" in ours.outputs[0]
    assert "megatron_lancet.model.transformer_block" in ours.model_modules
    for name in ("lm loss", "grad norm", "load_balancing_loss", "z_loss"):
        assert ours.series(name) == pytest.approx(one_rank().series(name), rel=TOLERANCE), name


def test_experts_of_different_ranks_have_different_initial_weights(token_data, tmp_path):
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
