"""The batches of a step: its samples dealt to bins over the data-parallel group, and what that is worth."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import torch

from megatron_lancet.features.bins.batches import Batch, Document, packed
from megatron_lancet.features.bins.exchange import Exchange
from megatron_lancet.planning.documents.bins import Prediction, balanced, bin_tokens, predicted
from megatron_lancet.planning.documents.cost import DocumentCost
from megatron_lancet.training.process.console import say


@dataclass(frozen=True)
class BinSettings:
    """How samples are dealt; the same on all ranks, and after a resume.

    Attributes:
        cost: of a document.
        max_tokens: bound on the positions of a bin, a multiple of ``multiple``.
        multiple: the positions of a bin are a multiple of this number.
        at_least: fewest positions of a bin, filled up; a multiple of ``multiple``.
        num_stages: stages of the pipeline.
    """

    cost: DocumentCost
    max_tokens: int
    multiple: int = 1
    at_least: int = 1
    num_stages: int = 1


@dataclass
class BinFigures:
    """The effect of bins in the training steps so far.

    Attributes:
        num_steps: how many there were.
        num_tokens_of_last_step: positions of all ranks' samples in the last step, without any padding; 0 where no
            samples are drawn.
        most_tokens: positions of the largest bin of all ranks, without what fills it up to a multiple.
    """

    num_steps: int = 0
    num_tokens_of_last_step: int = 0
    most_tokens: int = 0
    _sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, prediction: Prediction, most_tokens: int, padding: float) -> None:
        """Take in a step.

        Args:
            prediction: what its dealing costs.
            most_tokens: positions of its largest bin.
            padding: share of padding in this rank's positions, with what fills up to multiples.
        """
        self.num_steps += 1
        self.num_tokens_of_last_step = prediction.num_tokens
        self.most_tokens = max(self.most_tokens, most_tokens)
        self._sums["predicted_spread"] += prediction.spread
        self._sums["predicted_waiting"] += prediction.waiting
        self._sums["padding"] += padding

    def summary(self) -> dict[str, float]:
        """Means over steps, for the report."""
        means = {name: total / self.num_steps for name, total in self._sums.items()}
        return {**means, "most_tokens": self.most_tokens} if means else {}


class BinnedSteps:
    """Makes the batches of one step after the other of what a data loader draws.

    Args:
        settings: how samples are dealt.
        exchange: the data-parallel group.
        figures: receives what is predicted of each step; None for steps that are not reported.
    """

    def __init__(self, settings: BinSettings, exchange: Exchange, figures: BinFigures | None) -> None:
        self._settings, self._exchange, self._figures = settings, exchange, figures
        self._max_tokens = settings.max_tokens

    def batches(self, drawn: Sequence[Mapping[str, torch.Tensor]], num_bins: int) -> list[Batch]:
        """The micro-batches of this rank in a step. Collective over the data-parallel group.

        Args:
            drawn: the stacked samples of one step from the data loader.
            num_bins: micro-batches of the step.
        """
        settings, rank = self._settings, self._exchange.rank
        documents = [document for stack in drawn for document in _documents(stack)]
        positions = self._exchange.positions_of_all(documents)
        dealing = balanced(positions, num_bins, settings.cost, settings.max_tokens)
        self._warn_of(dealing.max_tokens)
        received = self._exchange.dealt(documents, positions, dealing)
        by_index = dict(zip(sorted(chain.from_iterable(dealing.bins[rank])), received, strict=True))
        made = [
            packed([by_index[index] for index in indices], settings.multiple, settings.at_least)
            for indices in dealing.bins[rank]
        ]
        if self._figures is not None:
            computed = sum(batch["tokens"].numel() for batch in made)
            self._figures.add(
                predicted(positions, dealing, settings.cost, settings.num_stages),
                max(chain.from_iterable(bin_tokens(positions, dealing))),
                1 - sum(document.num_positions for document in received) / computed,
            )
        return made

    def _warn_of(self, max_tokens: int) -> None:
        """Tell the user, once for each new maximum, that samples do not fit the bound."""
        if max_tokens > self._max_tokens:
            self._max_tokens = max_tokens
            say(
                f"Megatron-Lancet bins: the samples of a step do not fit bins of {self._settings.max_tokens} tokens, "
                f"the largest has {max_tokens}. Raise --lancet-pack-max-tokens if memory allows, or lower "
                "--micro-batch-size."
            )


class BinLoader:
    """Takes the place of a data loader: yields the bins of one step after the other.

    All samples of a step are drawn when its first bin is asked for, and none beyond it: samples that count as consumed
    count the finished steps, as without bins.

    Args:
        loader: Megatron's, whose items are samples of a data set of documents, stacked.
        steps: makes the bins.
        num_bins: returns the micro-batches of the step that begins.
    """

    def __init__(
        self, loader: Iterable[Mapping[str, torch.Tensor]], steps: BinnedSteps, num_bins: Callable[[], int]
    ) -> None:
        self._loader, self._steps, self._num_bins = loader, steps, num_bins

    def __iter__(self) -> Iterator[Batch]:
        drawn = iter(self._loader)
        while True:
            num_bins = self._num_bins()
            step = list(islice(drawn, num_bins))
            if len(step) < num_bins:  # the end of the data set, where Megatron's loader also ends
                return
            yield from self._steps.batches(step, num_bins)


def _documents(stack: Mapping[str, torch.Tensor]) -> Iterator[Document]:
    """The samples of a stack, without what fills them up."""
    for tokens, is_label, num_tokens in zip(
        stack["tokens"], stack["is_label"], stack["num_tokens"].tolist(), strict=True
    ):
        yield Document(tokens[:num_tokens], is_label[:num_tokens])
