"""Batches of documents, each of another size, on the ranks of a tensor-, context- and pipeline-parallel group.

Usage: batches_worker.py RESULT.json. Each rank writes RESULT.json.<rank>: by layout the shares that it read.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks.worker import finish, run_on_cpu

LAYOUTS: dict[str, dict[str, int]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "virtual stages": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}
BOUNDS = ([[0, 3, 8], [0, 8, 8]], [[0, 1, 2, 12]], [[0, 4]])
"""Of three micro-batches: by sample."""
_KEYS = ("tokens", "labels", "position_ids")


def samples() -> Iterator[dict[str, torch.Tensor]]:
    """Batches whose numbers tell which tensor, sample and position they are of."""
    for rows in BOUNDS:
        number = torch.arange(len(rows))[:, None] * 100 + torch.arange(rows[0][-1])
        tensors = {key: number + 1000 * at for at, key in enumerate(_KEYS)}
        yield {**tensors, "loss_mask": number % 5, "cu_seqlens": torch.tensor(rows, dtype=torch.int32)}


def shares(vp_stage: int | None) -> list[dict[str, Any]]:
    from megatron.core import parallel_state

    from megatron_lancet.training.batches.sharing import next_documents, tensors_of_stage

    iterator = samples() if parallel_state.get_tensor_model_parallel_rank() == 0 else None
    found = []
    for _ in BOUNDS:
        batch = next_documents(iterator, tensors_of_stage(vp_stage, predicts_further=False), sequence_parallel=False)
        tensors = {name: tensor.tolist() for name, tensor in batch.tensors.items()}
        packed = batch.packed_seq_params(by_document=False)
        sizes = [packed.max_seqlen_q, packed.tokens_per_sample, batch.num_samples]
        found.append({**tensors, "bounds": packed.cu_seqlens_q.tolist(), "sizes": sizes})
    return found


def main() -> None:
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        parallel_state.initialize_model_parallel(**layout, create_gloo_process_groups=False)
        stages = range(layout["virtual_pipeline_model_parallel_size"]) if name == "virtual stages" else [None]
        results[name] = [shares(stage) for stage in stages]
        parallel_state.destroy_model_parallel()
    finish(results)


if __name__ == "__main__":
    run_on_cpu(main)
