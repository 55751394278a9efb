"""Figures of the benchmark of evaluation, from samples with known answers."""

import pytest

from benchmarks.evaluation.cases import FIELDS, zipf_shares
from benchmarks.evaluation.summary import summarise


def test_shares_fall_as_one_over_the_number():
    assert zipf_shares(3) == pytest.approx([6 / 11, 3 / 11, 2 / 11])


def test_rows_are_those_of_the_samples():
    """Two passes over ten batches; the variant takes half the time, but for one batch."""

    def ranks(step_ms: float) -> list[list[float]]:
        values = {"step_ms": step_ms, "exposed_ms": step_ms / 4, "cpu_ms": 1.0, "payload_bytes": 5e5, "wire_bytes": 5e5}
        return [[values[field] for field in FIELDS], [values[field] / 2 for field in FIELDS]]

    quiet = {"is_disturbed": False}
    samples = {"none": [ranks(100.0)] * 10, "replicas-2": [*[ranks(50.0)] * 9, ranks(150.0)]}
    expected = {"most_over_mean": 1.5, "sent_share": 0.5}
    case = {
        "name": "45",
        "title": "",
        "rate_bps": 1e8,
        "variants": list(samples),
        "tokens_per_batch": 1000,
        "expected": dict.fromkeys(samples, expected),
        "sample_fields": FIELDS,
        "sweeps": [{"disturbance": quiet, "samples": samples}] * 2,
    }
    found = summarise(case)
    none, replicas = found.rows
    assert (none.tokens_per_s, none.median_ms, none.high_ms) == (10_000, 100, 100)
    assert replicas.tokens_per_s == pytest.approx(1000 * 10 / 0.6)
    assert (replicas.median_ms, replicas.high_ms) == (50, 150)
    assert replicas.over_baseline.median == 2
    assert replicas.text_over_baseline == pytest.approx(1000 / 600)
    assert found.exposed_share == pytest.approx((25 + 12.5) / 2 / 100)
    assert (found.num_batches, found.disturbed) == (10, [])
