"""Every rank of a model-parallel group has what its stage reads of batches of documents, whatever their sizes."""

from pathlib import Path

import pytest
import torch

from tests.parity.batches.batches_worker import BOUNDS, LAYOUTS, samples
from tests.ranks import launch

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("batches_worker.py")
INPUTS, TARGETS = ("tokens", "position_ids"), ("labels", "loss_mask")
STAGES: dict[str, list[list[tuple[str, ...]]]] = {
    "tensor": [[(*INPUTS, *TARGETS)]] * 2,
    "context": [[(*INPUTS, *TARGETS)]] * 2,
    "pipeline": [[INPUTS], [TARGETS]],
    "virtual stages": [[INPUTS, ()], [(), TARGETS]],
}
"""By layout and rank: what each stage of the rank reads beside the bounds."""
END_TO_END = ([0, 3, 8, 16], [0, 1, 2, 12], [0, 4])
SIZES = ([8, 8, 2], [10, 12, 1], [4, 4, 1])
"""Of each micro-batch: longest document, positions of a sample, samples."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch.results_of(WORKER, 2, tmp_path_factory.mktemp("batches"), timeout_s=90)


def share(tensor: torch.Tensor, layout: str, rank: int) -> list[list[float]]:
    """What a rank has of a tensor [B, S]; of four slices of a sample, context rank 0 has the outer ones."""
    if layout != "context":
        return tensor.tolist()
    slices = tensor.chunk(4, dim=1)
    return torch.cat([slices[rank], slices[3 - rank]], dim=1).tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_have_what_they_read_of_batches_of_any_size(results, layout):
    for rank, result in enumerate(results):
        assert len(result[layout]) == len(STAGES[layout][rank])
        for names, found in zip(STAGES[layout][rank], result[layout], strict=True):
            assert len(found) == len(BOUNDS)
            for batch, sample, bounds, sizes in zip(found, samples(), END_TO_END, SIZES, strict=True):
                expected = {name: share(sample[name], layout, rank) for name in names}
                assert batch == {**expected, "bounds": bounds, "sizes": sizes}
