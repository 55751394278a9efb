"""What the parts of the check share: small models on one rank of a mocked group whose link is free."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from benchmarks.gpu.check.place import Place
from benchmarks.gpu.sizes import SIZES, Size
from benchmarks.gpu.variants import Work
from megatron_lancet.patching import around, replaced
from megatron_lancet.runtime.rows import sums as row_sums
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_world import mock_world
from megatron_lancet.training.megatron.mock_patches import loopback_counts

NUM_RANKS = 8
NUM_MICRO_BATCHES = 2
_ON_DEVICE = Size(3, 256, 4, 2, 64, 256, 2, 2, 256, 4, vocab=512, moe_every=1, modern=True)
_IN_REHEARSAL = replace(SIZES["tiny"], moe_every=1, seq_length=16)
FULL_RECOMPUTE: Mapping[str, Any] = MappingProxyType(
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
)


def small_work(place: Place, **of_size: Any) -> Work:
    """A few layers with experts in bf16, grouped queries, two micro-batches.

    Args:
        of_size: fields of :class:`~benchmarks.gpu.sizes.Size` that differ.
    """
    size = _IN_REHEARSAL if place.is_rehearsal else _ON_DEVICE
    return Work(replace(size, **of_size), NUM_RANKS, NUM_MICRO_BATCHES, place.device)


@contextmanager
def mocked_ranks(num_ranks: int = NUM_RANKS) -> Iterator[None]:
    """Inside the context this process is rank 0 of a mocked expert-parallel group, and messages take no time."""
    with (
        mock_world(num_ranks, Link()),
        loopback_counts(),
        # Megatron's schedule sets it, and keeps it for the life of the process.
        replaced(MoEAuxLossAutoScaler, "main_loss_backward_scale", None),
    ):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks, create_gloo_process_groups=False)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


@dataclass
class RowSums:
    """
    Attributes:
        number: calls of the kernel that sums rows.
    """

    number: int = 0

    @property
    def is_missing(self) -> bool:
        """Whether there was none, although Triton is installed."""
        return not self.number and find_spec("triton") is not None


@contextmanager
def counted_row_sums() -> Iterator[RowSums]:
    """Inside the context the kernel sums rows of any size, unless algorithms are deterministic."""
    counted = RowSums()

    def sum_rows(stock: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
        counted.number += 1
        return stock(*args)

    with replaced(row_sums, "LEAST_BYTES", 0), around(row_sums, "sum_rows", sum_rows):
        yield counted


def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of named tensors, which later steps do not change."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
