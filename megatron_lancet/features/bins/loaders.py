"""Megatron's data loaders with others in their place."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.datasets.utils import Split
from megatron.training import training

from megatron_lancet.patching import around


def data_loaders(wrap: Callable[[Any, bool], Any]) -> AbstractContextManager[None]:
    """Lets other iterables take the place of the data loaders that Megatron builds inside the context.

    Args:
        wrap: receives a loader and whether it is for validation or test; returns what takes its place.
    """

    def build(stock: Any, dataset: Any, consumed_samples: int) -> Any:
        loader = stock(dataset, consumed_samples)
        if loader is None:
            return None
        split = dataset.split if hasattr(dataset, "split") else dataset.index_split
        return wrap(loader, split in (Split.valid, Split.test))

    return around(training, "build_pretraining_data_loader", build)
