"""Every rank of a model-parallel group has what its stage reads of batches of documents, whatever their sizes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ranks import launch

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, dict[str, int]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "virtual stages": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}
BOUNDS = ([[0, 3, 8], [0, 8, 8]], [[0, 1, 2, 12]], [[0, 4]])
"""Of three micro-batches: by sample."""
_KEYS = ("tokens", "labels", "position_ids")
INPUTS, TARGETS = ("tokens", "position_ids"), ("labels", "loss_mask")
STAGES: dict[str, list[list[tuple[str, ...]]]] = {
    "tensor": [[(*INPUTS, *TARGETS)]] * 2,
    "context": [[(*INPUTS, *TARGETS)]] * 2,
    "pipeline": [[INPUTS], [TARGETS]],
    "virtual stages": [[INPUTS, ()], [(), TARGETS]],
}
"""By layout and rank: what each stage of the rank reads next to the bounds."""
END_TO_END = ([0, 3, 8, 16], [0, 1, 2, 12], [0, 4])
SIZES = ([8, 8, 2, False], [10, 12, 1, True], [4, 4, 1, False])
"""Of each micro-batch: longest document, positions of a sample, samples, whether a document fills the last one up."""


def samples() -> Iterator[dict[str, torch.Tensor]]:
    """Batches whose numbers tell which tensor, sample and position they are of."""
    for rows, sizes in zip(BOUNDS, SIZES, strict=True):
        number = torch.arange(len(rows))[:, None] * 100 + torch.arange(rows[0][-1])
        tensors = {key: number + 1000 * at for at, key in enumerate(_KEYS)}
        fill = {"has_fill": torch.tensor([True])} if sizes[-1] else {}
        yield {**tensors, "loss_mask": number % 5, "cu_seqlens": torch.tensor(rows, dtype=torch.int32), **fill}


def shares(vp_stage: int | None) -> list[dict[str, Any]]:
    from megatron.core import parallel_state

    from megatron_lancet.features.documents.sharing import next_documents, tensors_of_stage

    iterator = samples() if parallel_state.get_tensor_model_parallel_rank() == 0 else None
    found = []
    for _ in BOUNDS:
        batch = next_documents(iterator, tensors_of_stage(vp_stage, predicts_further=False), sequence_parallel=False)
        tensors = {name: tensor.tolist() for name, tensor in batch.tensors.items()}
        packed = batch.packed_seq_params(on_host=True, by_document=False)
        sizes = [packed.max_seqlen_q, packed.tokens_per_sample, batch.num_samples, packed.has_fill]
        found.append({**tensors, "bounds": packed.cu_seqlens_q.tolist(), "sizes": sizes})
    return found


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    from megatron.core import parallel_state

    results: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        parallel_state.initialize_model_parallel(**layout, create_gloo_process_groups=False)
        stages = range(layout["virtual_pipeline_model_parallel_size"]) if name == "virtual stages" else [None]
        results[name] = [shares(stage) for stage in stages]
        parallel_state.destroy_model_parallel()
    return results


results = launch.results(all_results, 2, timeout_s=90)
"""Per rank: what is found for each case."""


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
