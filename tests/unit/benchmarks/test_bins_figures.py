"""Figures of the benchmark of bins, from samples with known answers."""

import pytest

from benchmarks.bins.cases import BALANCED, FIELDS, FIRST_FIT, PADDED, ROWS, computed_tokens, dealings
from benchmarks.bins.summary import as_markdown, summarise
from benchmarks.harness.cases import Shape
from megatron_lancet.planning.documents.cost import DocumentCost


def test_each_way_has_all_documents_once():
    shape, drawn = Shape(seq_length=8, micro_batches=2), [[8, 3, 5], [2, 2]]
    for name, deal in dealings(shape, DocumentCost(0.01)).items():
        dealing = deal(drawn)
        assert sorted(sample for rank in dealing.bins for indices in rank for sample in indices) == list(range(5))
        assert [len(rank) for rank in dealing.bins] == ([3, 2] if name == ROWS else [2, 2])
        num_tokens = sum(map(sum, computed_tokens(name, drawn, dealing, shape)))
        assert num_tokens == {ROWS: 5 * 8, PADDED: 2 * 2 + 8 + 3 + 5}.get(name, 20)


def test_rows_are_those_of_the_samples():
    """Two sweeps over two steps of 1000 and 3000 tokens; bins take half the time."""

    def ranks(step_ms: float) -> list[list[float]]:
        values = {"step_ms": step_ms, "exposed_ms": step_ms / 4, "cpu_ms": 1.0, "payload_bytes": 5e5}
        return [[values[field] for field in FIELDS], [values[field] / 2 for field in FIELDS]]

    samples = {FIRST_FIT: [ranks(100.0), ranks(300.0)], BALANCED: [ranks(50.0), ranks(150.0)]}
    compute_ms = {
        FIRST_FIT: [[[10.0, 30.0], [30.0, 10.0]], [[100.0, 20.0], [80.0, 20.0]]],
        BALANCED: [[[10.0, 20.0], [10.0, 20.0]], [[40.0, 30.0], [40.0, 30.0]]],
    }
    case = {
        "name": "functions",
        "title": "some documents",
        "rate_bps": 1e8,
        "variants": list(samples),
        "documents": {"per_rank": 3, "mean_tokens": 666.7},
        "num_tokens": [1000, 3000],
        "computed_tokens": {FIRST_FIT: [1000, 3000], BALANCED: [1000, 4000]},
        "sample_fields": FIELDS,
        "sweeps": [{"disturbance": {"is_disturbed": False}, "samples": samples, "compute_ms": compute_ms}] * 2,
    }
    found = summarise(case)
    first_fit, balanced = found.rows
    assert (first_fit.tokens_per_s, balanced.tokens_per_s) == pytest.approx((10_000, 20_000))
    assert (balanced.over_baseline.median, balanced.all_over_baseline) == pytest.approx((2, 2))
    assert first_fit.spread == pytest.approx(1 - (10 + 10 + 80 + 20) / (30 + 30 + 100 + 20))
    assert balanced.spread == 0
    assert balanced.waits == pytest.approx(0.25)
    assert (first_fit.padding, balanced.padding) == pytest.approx((0, 0.2))
    assert (found.num_steps, found.disturbed) == (4, [])
    assert "| balanced | 20000 | 2.00 (2.00 to 2.00) | 2.00 | 0.0 % | 25 % | 20 % |" in as_markdown([found])
