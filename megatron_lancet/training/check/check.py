"""Runs a shrunk launch on one rank, with its layout, and with the overlap, and finds what makes a difference."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lancet.training.check.compare import Comparison, Outcome, compare, outcome_of
from megatron_lancet.training.check.layout import Layout, without_an_axis
from megatron_lancet.training.check.ranks import FailedRunError, RefusedRunError, run_ranks
from megatron_lancet.training.check.shrink import Shrunk
from megatron_lancet.training.check.worker import Prepare, Task

_STOCK = ["--lancet-plan", "off"]
_SEEDS = (1, 2)
"""Seeds of the samples. A difference that only one of them has is a token that rounding sent to another expert."""
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
"""What is removed, one at a time, beside the axes, where a launch has it: its flags."""


@dataclass(frozen=True)
class Guilt:
    """Where a difference comes from.

    Attributes:
        axes: axes of the layout and features without which, each alone, there is none.
        innocent: those without which the difference stays.
        refused: those that Megatron does not run without.
    """

    axes: list[str] = field(default_factory=list)
    innocent: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        stock: stock Megatron with the layout, compared with one rank.
        ours: the overlap, compared with stock with the same layout; None where it did not run.
        why_not_ours: why it did not.
        guilt: of stock's difference; None without one.
        flipped: whether a difference was there with one seed of the samples only.
        num_runs: runs that the check took.
    """

    shrunk: Shrunk
    stock: Comparison
    ours: Comparison | None
    why_not_ours: str
    guilt: Guilt | None
    flipped: bool
    num_runs: int

    @property
    def differs(self) -> bool:
        """Whether stock or the overlap does."""
        return self.stock.differs or (self.ours is not None and self.ours.differs)


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
                self._shrunk.documents,
                self._prepare if is_parallel else None,
            )
            run_ranks(task, layout.num_ranks, self._timeout_s)
            self._outcomes[key] = outcome_of(folder, layout.num_ranks)
        return self._outcomes[key]

    def stock(self, words: list[str], layout: Layout, seed: int) -> Comparison:
        """Stock with a layout, compared with stock on one rank."""
        expected = self.run(words, Layout(), _STOCK, seed)
        return compare(self.run(words, layout, _STOCK, seed), expected)

    def guilt(self, seed: int) -> Guilt:
        """Removes each axis and each feature alone, and sees whether the difference goes."""
        guilt = Guilt()
        for name, words, layout in self._less():
            try:
                still = layout.num_ranks > 1 and self.stock(words, layout, seed).differs
            except (RefusedRunError, FailedRunError):
                guilt.refused.append(name)
            else:
                (guilt.innocent if still else guilt.axes).append(name)
        return guilt

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
        with_ours: whether the overlap is compared, too.
        settings: of :class:`Checker`.

    Raises:
        RefusedRunError, FailedRunError: stock does not run on one rank or with the layout, or the overlap fails.
    """
    checker = Checker(shrunk, folder, **settings)  # type: ignore[arg-type]
    padding = bool(settings.get("padding"))
    words, layout = shrunk.words, shrunk.layout
    stock, flipped = checker.stock(words, layout, _SEEDS[0]), False
    seed = _SEEDS[0]
    if stock.differs:
        again = checker.stock(words, layout, _SEEDS[1])
        if not again.differs:
            stock, flipped, seed = again, True, _SEEDS[1]
    guilt = checker.guilt(seed) if stock.differs else None
    ours, why = None, "--stock-only"
    if with_ours:
        ours, why = _ours(checker, shrunk, seed) if not padding else (None, "not compared with padding")
    return Finding(shrunk, stock, ours, why, guilt, flipped, checker.num_runs)


def _ours(checker: Checker, shrunk: Shrunk, seed: int) -> tuple[Comparison | None, str]:
    words, layout = shrunk.words, shrunk.layout
    try:
        found = checker.run(words, layout, shrunk.ours, seed)
    except RefusedRunError as refusal:
        return None, f"refused: {refusal}"
    if not found.overlaps:
        return None, "stock modules: there is nothing to overlap, or the launch asks for what the overlap does not do"
    result = compare(found, checker.run(words, layout, _STOCK, seed))
    other = _SEEDS[1]
    if result.differs and seed != other:
        again = compare(checker.run(words, layout, shrunk.ours, other), checker.run(words, layout, _STOCK, other))
        result = result if again.differs else again
    return result, ""


def _without(words: list[str], flags: tuple[str, ...]) -> list[str]:
    kept: list[str] = []
    keep = True
    for word in words:
        if word.startswith("--"):
            keep = word not in flags
        if keep:
            kept.append(word)
    return kept
