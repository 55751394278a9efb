"""Lina's forecast of expert popularity (ATC 2023, inference): from the experts that a batch's tokens chose so far.

Tokens that chose alike in the last layers tend to choose alike in the next one. A table, profiled on earlier batches,
says for each *path*, the choices of a token in the last three layers, how often each expert of the next one followed.
The popularity of a batch in a layer is the mean over its tokens of what their paths say, and is known before that
layer's router has run. A path that was never seen counts by its last two choices, or its last one; if not even that was
seen, as the layer's tokens do in the mean.

Legend: E experts, k experts of a token.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from megatron_lancet.planning.load.popularity import Choice, Shares, shares_of

PATH_LENGTH = 3
"""Layers of a path."""
type Path = tuple[Choice, ...]
"""A token's choices in the layers before one, the latest last; at most :data:`PATH_LENGTH`."""


class PathTable:
    """The choices that followed each path into one layer."""

    def __init__(self, num_experts: int) -> None:
        """
        Args:
            num_experts: E of the layer that is forecast.
        """
        self._num_experts = num_experts
        self._counts: defaultdict[Path, list[int]] = defaultdict(lambda: [0] * num_experts)

    def learn(self, paths: Iterable[Path], choices: Iterable[Choice]) -> None:
        """Count what some tokens chose.

        Args:
            paths: of each token, up to the layer.
            choices: of each token, in the layer.
        """
        for (path, choice), number in Counter(zip(paths, choices, strict=True)).items():
            for known in _shortened(path):
                counts = self._counts[known]
                for expert in choice:
                    counts[expert] += number

    def forecast(self, paths: Iterable[Path]) -> Shares:
        """Popularity of the layer's experts for tokens with these paths; even shares if nothing was learned."""
        totals = [0.0] * self._num_experts
        for path, number in Counter(paths).items():
            for expert, share in enumerate(self._shares_after(path)):
                totals[expert] += number * share
        return shares_of(totals)

    def _shares_after(self, path: Path) -> Shares:
        for known in _shortened(path):
            if known in self._counts:
                return shares_of(self._counts[known])
        return shares_of([0] * self._num_experts)


def _shortened(path: Path) -> list[Path]:
    """The path, and what is left of it without its first choices; the empty path last."""
    return [path[start:] for start in range(len(path) + 1)]


def paths_into(layer: int, choices: Sequence[Sequence[Choice]]) -> list[Path]:
    """The paths of a window's tokens into a layer, as a list of tokens.

    Args:
        layer: place among the layers with experts, from 0.
        choices: of each token in each layer with experts, [layers][tokens].
    """
    before = choices[max(0, layer - PATH_LENGTH) : layer]
    return list(zip(*before, strict=True)) if before else [()] * len(choices[layer])
