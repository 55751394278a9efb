"""Runs a shrunk launch on one rank, with its layout, and with the overlap, and finds what makes a difference."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from megatron_lancet.lab.check.compare import Comparison, Outcome, compare, outcome_of
from megatron_lancet.lab.check.layout import Layout, without_an_axis
from megatron_lancet.lab.check.ranks import FailedRunError, RefusedRunError, run_ranks
from megatron_lancet.lab.check.shrink import Shrunk
from megatron_lancet.lab.check.worker import Prepare, Task

_STOCK = ["--lancet-plan", "off"]
SEEDS = (1, 2)
"""Seeds of the samples. If the first shows a difference, the second shows whether it depends on the samples."""
_NO_OVERLAP = "stock modules: nothing to overlap, or the launch uses a feature that the overlap does not support"
_FEATURES = {
    "the distributed optimizer": ("--use-distributed-optimizer", "--overlap-param-gather"),
    "overlapped reductions": ("--overlap-grad-reduce", "--overlap-param-gather"),
    "averages in collectives": ("--ddp-average-in-collective",),
    "recompute": ("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-modules"),
    "the routers' balancing loss": ("--moe-aux-loss-coeff",),
    "the routers' z-loss": ("--moe-z-loss-coeff",),
    "loss per token": ("--calculate-per-token-loss",),
    "shared experts": ("--moe-shared-expert-intermediate-size", "--moe-shared-expert-gate"),
    "multi-token prediction": ("--mtp-num-layers",),
    "latent attention": ("--multi-latent-attention", "--qk-layernorm"),
}
"""Flags of the features that are removed one at a time, in addition to the axes."""


class Verdict(StrEnum):
    """The result of a check."""

    EQUAL = "equal"
    DIFFERS = "differs"
    NOT_COMPARED = "not compared"
    """Stock is equal, but the requested overlap did not run."""


@dataclass(frozen=True)
class Culprit:
    """The causes of a difference.

    Attributes:
        axes: axes of the layout and features without which, each alone, there is none.
        cleared: those without which the difference stays.
        refused: those that Megatron does not run without.
    """

    axes: list[str] = field(default_factory=list)
    cleared: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """The findings of a check.

    Attributes:
        stock: stock Megatron with the layout, compared with one rank.
        ours: the overlap, compared with stock with the same layout; None where it did not run.
        why_not_ours: why it did not; empty if it did.
        culprit: of stock's difference; None without one.
        stock_seeds: seeds whose samples show a difference of stock. One suffices for a difference.
        our_seeds: seeds whose samples show a difference of the overlap.
        num_runs: runs that the check took.
        with_ours: whether a comparison of the overlap was requested.
    """

    shrunk: Shrunk
    stock: Comparison
    ours: Comparison | None
    why_not_ours: str
    culprit: Culprit | None
    stock_seeds: tuple[int, ...]
    our_seeds: tuple[int, ...]
    num_runs: int
    with_ours: bool = True

    @property
    def differs(self) -> bool:
        """Whether stock or the overlap differs with any seed."""
        return self.stock.differs or (self.ours is not None and self.ours.differs)

    @property
    def verdict(self) -> Verdict:
        """The result of the check."""
        if self.differs:
            return Verdict.DIFFERS
        return Verdict.NOT_COMPARED if self.with_ours and self.ours is None else Verdict.EQUAL


class Checker:
    """Runs layouts of one shrunk launch, each once.

    Args:
        prepare: context for the runs with the launch's layout, for tests that change Megatron in its ranks.
        say: receives a line for each run that begins.
    """

    def __init__(
        self,
        shrunk: Shrunk,
        folder: Path,
        timeout_s: float,
        padding: bool = False,
        prepare: Prepare | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._shrunk, self._folder, self._timeout_s = shrunk, folder, timeout_s
        self._padding, self._prepare, self._say = padding, prepare, say
        self._outcomes: dict[tuple[object, ...], Outcome] = {}
        self.num_runs = 0

    def run(self, words: list[str], layout: Layout, flags: list[str], seed: int) -> Outcome:
        """The outcome of a run.

        Args:
            words: flags of the model and of training.
            flags: of the overlap.

        Raises:
            RefusedRunError, FailedRunError: it did not run.
        """
        key = (*words, "|", *flags, layout, seed)
        if key not in self._outcomes:
            self.num_runs += 1
            what = "stock" if flags == _STOCK else "overlap"
            self._say(f"{what} on {layout.num_ranks} CPU rank{'s'[: layout.num_ranks > 1]}: {layout}")
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            weights = self._folder / f"weights-{abs(hash(tuple(words)))}"
            is_parallel = layout.num_ranks > 1
            task = Task(
                (*words, *layout.words(), *flags),
                weights,
                folder,
                seed,
                self._padding,
                self._shrunk.stock_mask,
                self._prepare if is_parallel else None,
            )
            run_ranks(task, layout.num_ranks, self._timeout_s)
            self._outcomes[key] = outcome_of(folder, layout.num_ranks)
        return self._outcomes[key]

    def stock(self, words: list[str], layout: Layout, seed: int) -> Comparison:
        """Stock with a layout, compared with stock on one rank."""
        expected = self.run(words, Layout(), _STOCK, seed)
        return compare(self.run(words, layout, _STOCK, seed), expected)

    def find_culprit(self, seed: int) -> Culprit:
        """Removes each axis and each feature alone, and sees whether the difference goes."""
        culprit = Culprit()
        for name, words, layout in self._less():
            try:
                still = layout.num_ranks > 1 and self.stock(words, layout, seed).differs
            except (RefusedRunError, FailedRunError):
                culprit.refused.append(name)
            else:
                (culprit.cleared if still else culprit.axes).append(name)
        return culprit

    def _less(self) -> Iterator[tuple[str, list[str], Layout]]:
        words, layout = self._shrunk.words, self._shrunk.layout
        for name, less in without_an_axis(layout):
            yield name, words, less
        for name, flags in _FEATURES.items():
            without = _without(words, flags)
            if without != words:
                yield name, without, layout


def check(shrunk: Shrunk, folder: Path, with_ours: bool = True, **settings: object) -> Finding:
    """Checks a shrunk launch.

    Args:
        folder: for files of the runs.
        with_ours: whether the overlap is also compared.
        settings: of :class:`Checker`.

    Raises:
        RefusedRunError, FailedRunError: stock does not run on one rank or with the layout, or the overlap fails.
    """
    checker = Checker(shrunk, folder, **settings)  # type: ignore[arg-type]
    stock, stock_seeds = _with_seeds(lambda seed: checker.stock(shrunk.words, shrunk.layout, seed))
    culprit = checker.find_culprit(stock_seeds[0]) if stock_seeds else None
    ours, our_seeds, why = _ours(checker, shrunk) if with_ours else (None, (), "--stock-only")
    return Finding(shrunk, stock, ours, why, culprit, stock_seeds, our_seeds, checker.num_runs, with_ours)


def _with_seeds(compared: Callable[[int], Comparison]) -> tuple[Comparison, tuple[int, ...]]:
    """Returns the first seed's comparison and the seeds that differ; other seeds run only if the first one differs."""
    first = compared(SEEDS[0])
    if not first.differs:
        return first, ()
    return first, (SEEDS[0], *(seed for seed in SEEDS[1:] if compared(seed).differs))


def _ours(checker: Checker, shrunk: Shrunk) -> tuple[Comparison | None, tuple[int, ...], str]:
    words, layout = shrunk.words, shrunk.layout

    def compared(seed: int) -> Comparison:
        return compare(checker.run(words, layout, shrunk.ours, seed), checker.run(words, layout, _STOCK, seed))

    try:
        found = checker.run(words, layout, shrunk.ours, SEEDS[0])
    except RefusedRunError as refusal:
        return None, (), f"refused: {refusal}"
    if not found.overlaps:
        return None, (), _NO_OVERLAP
    return *_with_seeds(compared), ""


def _without(words: list[str], flags: tuple[str, ...]) -> list[str]:
    kept: list[str] = []
    keep = True
    for word in words:
        if word.startswith("--"):
            keep = word not in flags
        if keep:
            kept.append(word)
    return kept
