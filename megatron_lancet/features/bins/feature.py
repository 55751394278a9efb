"""``--lancet-pack-documents``: documents are samples, and the samples of a step are dealt to the bins of all ranks."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_lancet.config import LancetConfig
from megatron_lancet.feature import ActiveFeature, Feature, RunFacts
from megatron_lancet.feature_parts import Samples
from megatron_lancet.features.bins.dataset import DocumentDataset
from megatron_lancet.features.bins.exchange import Exchange
from megatron_lancet.features.bins.flags import BinsFlags
from megatron_lancet.features.bins.limits import FLAG, bin_settings, bins_note, check_bins, most_positions
from megatron_lancet.features.bins.loaders import data_loaders
from megatron_lancet.features.bins.step import BinFigures, BinLoader, BinnedSteps, BinSettings
from megatron_lancet.report.summary import tokens_per_second
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.plan.attention import DOCUMENTS_FLAG
from megatron_lancet.training.run import Run

KEY = "bins"
"""In ``report.json``."""


class Bins(Feature):
    """``--lancet-pack-documents``."""

    name = "bins"
    flags = BinsFlags

    def normalize(self, args: argparse.Namespace, config: LancetConfig) -> Iterator[str]:
        """Keeps documents apart in attention."""
        if config.of(BinsFlags).pack_documents and not args.dataloader_inter_document_masking:
            args.dataloader_inter_document_masking = True
            yield f"{DOCUMENTS_FLAG} is on: {FLAG} packs documents"

    def samples(self, args: argparse.Namespace, config: LancetConfig) -> Samples | None:
        """Documents; a micro-batch is one bin, as long as it may be."""
        if not config.of(BinsFlags).pack_documents:
            return None
        return Samples(
            DocumentDataset, 1, most_positions(args, config.of(BinsFlags)), f"with {FLAG} the number of samples"
        )

    def check(self, facts: RunFacts) -> None:
        """Refuses what does not work with bins."""
        check_bins(facts.args, facts.config)

    def announce(self, facts: RunFacts) -> Iterator[str]:
        """Yields a line on the bins."""
        settings = bin_settings(facts.args, facts.config)
        if settings is not None:
            yield f"bins: {bins_note(settings)}"

    def start(self, run: Run) -> "ActiveBins | None":
        """Deals the samples of the run."""
        settings = bin_settings(run.facts.args, run.config)
        return None if settings is None else ActiveBins(run.facts.args, settings, run.recorder)


class ActiveBins(ActiveFeature):
    """The bins of a run: Megatron's data loaders yield them, and the report says what they were worth."""

    def __init__(self, args: argparse.Namespace, settings: BinSettings, recorder: StepRecorder) -> None:
        self._args, self._settings, self._recorder = args, settings, recorder
        # None on ranks that draw no samples: all ranks of a tensor-parallel group except the first.
        self._figures = BinFigures()

    def enter(self, stack: ExitStack) -> None:
        """Lets the data loaders that Megatron builds yield bins."""
        stack.enter_context(data_loaders(self._loader))

    def num_tokens(self) -> int:
        """Positions of all ranks' samples, without any padding."""
        return self._figures.num_tokens_of_last_step

    def _loader(self, loader: Any, is_evaluation: bool) -> BinLoader:
        num_bins: Callable[[], int] = get_num_microbatches
        if is_evaluation:
            samples = self._args.eval_micro_batch_size * self._args.data_parallel_size
            num_evaluated = self._args.eval_global_batch_size // samples
            num_bins = lambda: num_evaluated  # noqa: E731
        steps = BinnedSteps(self._settings, self._exchange(), None if is_evaluation else self._figures)
        return BinLoader(loader, steps, num_bins)

    def _exchange(self) -> Exchange:
        """The ranks that draw different samples. Over gloo if Megatron has its groups: no GPU waits for lengths."""
        if self._args.use_gloo_process_groups:
            return Exchange(parallel_state.get_data_parallel_group_gloo(), torch.device("cpu"))
        return Exchange(parallel_state.get_data_parallel_group(), torch.device(torch.cuda.current_device()))

    def summary(self) -> Mapping[str, Any]:
        """How samples were dealt, and means over the training steps."""
        settings = self._settings
        return {
            "real_tokens_per_second": tokens_per_second(self._recorder.reported),
            KEY: {
                "tokens_per_pair": settings.cost.tokens_per_pair,
                "max_tokens": settings.max_tokens,
                **self._figures.summary(),
            },
        }

    def lines(self, report: Mapping[str, Any]) -> Sequence[str]:
        """The line on the bins, if any were drawn on this rank."""
        bins = report[KEY]
        if "predicted_spread" not in bins:
            return ()
        return [
            f"bins               at most {bins['most_tokens']} tokens, {100 * bins['padding']:.1f} % padding, "
            f"predicted times differ by {100 * bins['predicted_spread']:.1f} % over ranks"
        ]


BINS = Bins()
