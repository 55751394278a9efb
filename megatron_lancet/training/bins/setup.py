"""Bins in a run: Megatron's data loaders yield them, and the report says what they were worth."""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_lancet.training.bins.exchange import Exchange
from megatron_lancet.training.bins.step import BinFigures, BinLoader, BinnedSteps, BinSettings
from megatron_lancet.training.megatron.patches import data_loaders


class Bins:
    """The bins of a run.

    Attributes:
        figures: of the training steps so far; without any on ranks that draw no samples, those of a tensor-parallel
            group but the first.
    """

    def __init__(self, args: argparse.Namespace, settings: BinSettings) -> None:
        self._args, self._settings = args, settings
        self.figures = BinFigures()

    def loaders(self) -> AbstractContextManager[None]:
        """Inside the context the data loaders that Megatron builds yield bins."""
        return data_loaders(self._loader)

    def _loader(self, loader: Any, is_evaluation: bool) -> BinLoader:
        num_bins: Callable[[], int] = get_num_microbatches
        if is_evaluation:
            samples = self._args.eval_micro_batch_size * self._args.data_parallel_size
            num_evaluated = self._args.eval_global_batch_size // samples
            num_bins = lambda: num_evaluated  # noqa: E731
        steps = BinnedSteps(self._settings, self._exchange(), None if is_evaluation else self.figures)
        return BinLoader(loader, steps, num_bins)

    def _exchange(self) -> Exchange:
        """The ranks that draw different samples. Over gloo if Megatron has its groups: no GPU waits for lengths."""
        if self._args.use_gloo_process_groups:
            return Exchange(parallel_state.get_data_parallel_group_gloo(), torch.device("cpu"))
        return Exchange(parallel_state.get_data_parallel_group(), torch.device(torch.cuda.current_device()))

    def summary(self) -> dict[str, Any]:
        """Of report.json: how samples were dealt, and means over the training steps."""
        settings = self._settings
        return {
            "tokens_per_pair": settings.cost.tokens_per_pair,
            "max_tokens": settings.max_tokens,
            **self.figures.summary(),
        }
