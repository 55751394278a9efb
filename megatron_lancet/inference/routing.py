"""What a checkpoint's routers choose for a text, window by window."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from megatron_lancet.inference.choices import recorded_choices
from megatron_lancet.inference.evaluate import TokenStream, batches, read_stream, summed_loss
from megatron_lancet.inference.load import LoadedModel
from megatron_lancet.inference.session import Session
from megatron_lancet.planning.load.popularity import Choice
from megatron_lancet.runtime.collectives import from_all_ranks

_MEASURED_EVERY = 8
"""Batches: the popularity of experts is counted on an eighth of the text, spread over it."""


type Rows = dict[int, tuple[tuple[int, ...], ...]]
"""By layer number: rows from each rank for each expert, [ranks][E]."""


@dataclass(frozen=True)
class RoutedWindows:
    """
    Attributes:
        windows: what each token chose in each layer, by its number; a window is a batch of all ranks.
        rows: rows of all windows by layer: from each rank for each expert, [ranks][E].
    """

    windows: list[dict[int, list[Choice]]]
    rows: Rows


def routed_windows(
    session: Session, data: str, json_key: str, batch_size: int, max_tokens: int | None
) -> RoutedWindows | None:
    """Run a checkpoint's model over a text on all ranks; the result on rank 0, None on the others.

    Args:
        data: as for :func:`read_stream`.
        json_key: the same.
        batch_size: samples of a window on each rank.
        max_tokens: of the text, from the first on; None for all.

    Raises:
        UsageError: the data or the weights don't fit.
    """
    stream = read_stream(data, session.tokenizer, json_key)
    windows: list[dict[int, list[Choice]]] = []
    rows: Rows = {}
    with session.model() as model, recorded_choices(model) as recorder:
        for batch in batches(model, stream, batch_size, max_tokens):
            summed_loss(model, batch)
            by_rank = from_all_ranks((recorder.choices(batch.weights), recorder.rows(batch.weights)))
            if model.rank == 0:
                choices = [of_rank for of_rank, _ in by_rank]
                windows.append({layer: [one for of_rank in choices for one in of_rank[layer]] for layer in choices[0]})
                rows = _summed(rows, [of_rank for _, of_rank in by_rank])
        is_first = model.rank == 0
    return RoutedWindows(windows, rows) if is_first else None


def measured_popularity(
    model: LoadedModel, stream: TokenStream, batch_size: int, max_tokens: int | None
) -> dict[int, tuple[int, ...]]:
    """Rows of each expert by layer number, the same on all ranks, of every eighth batch of a stream.

    Args:
        batch_size: windows that a rank computes at once.
        max_tokens: of the stream, from the first on; None for all.
    """
    rows: Rows = {}
    with recorded_choices(model) as recorder:
        for batch in islice(batches(model, stream, batch_size, max_tokens), 0, None, _MEASURED_EVERY):
            summed_loss(model, batch)
            rows = _summed(rows, from_all_ranks(recorder.rows(batch.weights)))
    return {layer: tuple(map(sum, zip(*by_rank, strict=True))) for layer, by_rank in rows.items()}


def _summed(rows: Rows, by_rank: Sequence[Mapping[int, Sequence[int]]]) -> Rows:
    """The rows so far, plus the rows of another batch of all ranks."""
    found: Rows = {}
    for layer in by_rank[0]:
        before = rows.get(layer, tuple((0,) * len(of_rank[layer]) for of_rank in by_rank))
        found[layer] = tuple(
            tuple(map(sum, zip(was, of_rank[layer], strict=True))) for was, of_rank in zip(before, by_rank, strict=True)
        )
    return found
