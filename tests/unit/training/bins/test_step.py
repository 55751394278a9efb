"""The batches of bins, and the loader that yields them step by step."""

from itertools import chain, islice

import pytest
import torch
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, get_rerun_state_machine

from megatron_lancet.features.bins.batches import Document, packed
from megatron_lancet.features.bins.step import BinFigures, BinLoader, BinnedSteps, BinSettings
from megatron_lancet.planning.documents.cost import DocumentCost


def document(*tokens, without=()):
    is_label = [token not in without for token in tokens]
    return Document(torch.tensor(tokens, dtype=torch.int32), torch.tensor(is_label, dtype=torch.uint8))


def stack(*lengths, first=1, size=40):
    """A data loader's samples: of positions ``lengths``; the first token of each tells which one it is."""
    tokens = torch.zeros(len(lengths), size, dtype=torch.int32)
    for row, length in enumerate(lengths):
        tokens[row, : length + 1] = torch.arange(length + 1) + 100 * (first + row)
    return {"tokens": tokens, "is_label": (tokens > 0).byte(), "num_tokens": torch.tensor(lengths) + 1}


class OneRank:
    """In place of an exchange: a group of one rank."""

    rank = 0

    def positions_of_all(self, documents):
        return [[document.num_positions for document in documents]]

    def dealt(self, drawn, positions, dealing):
        return [drawn[index] for index in sorted(chain.from_iterable(dealing.bins[0]))]


def steps(figures=None, max_tokens=20, **settings):
    return BinnedSteps(BinSettings(DocumentCost(0.0), max_tokens, **settings), OneRank(), figures)


def names(batch):
    """Samples of a batch by their first tokens."""
    return sorted((batch["tokens"][batch["loss_mask"] > 0] // 100).unique().tolist())


def test_packed_documents_have_bounds_and_filling_has_no_loss():
    batch = packed([document(1, 2, 3, without=[2]), document(7, 8)], multiple=4, at_least=4)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "tokens": [[1, 2, 7, 0]],
        "labels": [[2, 3, 8, 0]],
        "loss_mask": [[0, 1, 1, 0]],
        "position_ids": [[0, 1, 0, 0]],
        "cu_seqlens": [[0, 2, 3, 4]],
        "max_seqlen": [2],
        "has_fill": [True],
    }
    full = packed([document(1, 2, 3)], multiple=2, at_least=2)
    assert (full["cu_seqlens"].tolist(), full["has_fill"].tolist()) == ([[0, 2]], [False])
    assert packed([document(1, 2)], multiple=2, at_least=8)["cu_seqlens"].tolist() == [[0, 1, 8]]


def test_loader_draws_by_step_and_yields_each_sample_once():
    drawn = []

    def loader():
        for number in range(5):
            drawn.append(number)
            yield stack(9, 3, 5, first=1 + 3 * number)

    sizes = iter([2, 1, 3])  # the third step finds too few samples
    bins = iter(BinLoader(loader(), steps(), lambda: next(sizes)))
    first = list(islice(bins, 2))
    assert drawn == [0, 1]
    assert sorted(chain.from_iterable(map(names, first))) == [1, 2, 3, 4, 5, 6]
    assert names(next(bins)) == [7, 8, 9]
    assert drawn == [0, 1, 2]
    assert list(bins) == []


def test_megatrons_rerun_replays_a_steps_bins_without_drawing():
    loader = BinLoader([stack(9, 3, first=first) for first in (1, 3, 5, 7)], steps(), lambda: 2)
    iterator = RerunDataIterator(iter(loader))
    machine = get_rerun_state_machine()
    mode = machine.get_mode()
    machine.set_mode(RerunMode.REPORT_DETERMINISM_STATS)
    try:
        once = [next(iterator) for _ in range(2)]
        iterator.rewind()
        again = [next(iterator) for _ in range(2)]
        iterator.advance()
        following = [next(iterator) for _ in range(2)]
    finally:
        machine.set_mode(mode)
    assert all(torch.equal(one[name], other[name]) for one, other in zip(once, again, strict=True) for name in one)
    assert sorted(chain.from_iterable(map(names, once))) == [1, 2, 3, 4]
    assert sorted(chain.from_iterable(map(names, following))) == [5, 6, 7, 8]


def test_bound_that_is_raised_is_told_once_for_each_maximum(capsys):
    made = steps(max_tokens=10)
    for lengths in ([6, 6, 6], [6, 6, 6], [5, 5, 5], [9, 9, 9]):
        made.batches([stack(*lengths)], 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("the largest has ")[1].split(".")[0] for line in lines] == ["18", "27"]


def test_figures_of_steps():
    figures = BinFigures()
    assert figures.summary() == {}
    made = steps(figures, multiple=4)
    made.batches([stack(8, 4, 4), stack(8, 4, 4)], 2)
    assert figures.num_tokens_of_last_step == 32
    assert figures.summary() == {
        "predicted_spread": 0.0,
        "predicted_waiting": 0.0,
        "padding": 0.0,
        "most_tokens": 16,
    }
    made.batches([stack(9, 3)], 1)
    assert figures.num_tokens_of_last_step == 12
    assert figures.summary()["padding"] == 0.0
    made.batches([stack(9, 4)], 1)
    assert figures.summary()["padding"] == pytest.approx(3 / 16 / 3)  # 13 positions are filled up to 16
