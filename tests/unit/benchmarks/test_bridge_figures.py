"""Figures of the benchmark of Bridge's loop, from samples with known answers."""

import pytest

from benchmarks.bridge.summary import as_markdown, summarise
from benchmarks.bridge.variants import BRIDGE_PLAN, BRIDGE_STOCK, PLAN, STOCK


def test_speedups_of_both_loops_are_compared():
    """Two turns of two steps; the machine is half as fast in the second, which the ratios do not show."""
    of_variant = {STOCK: 300.0, PLAN: 200.0, BRIDGE_STOCK: 330.0, BRIDGE_PLAN: 216.0}
    variants = {
        name: {"samples": [[[slower * step_ms, 0.0, 0.0, 5.0]] * 2 for slower in (1, 2)]}
        for name, step_ms in of_variant.items()
    }
    found = summarise({"name": "45-m4", "rate_bps": 1e8, "variants": variants})
    assert found.speedup.median == pytest.approx(1.5)
    assert found.bridge_speedup.median == pytest.approx(330 / 216)
    assert found.to_megatron.median == pytest.approx(1.08)
    assert found.stock_to_megatron.median == pytest.approx(1.1)
    assert found.difference == pytest.approx(330 / 216 / 1.5 - 1)
    text = as_markdown([found])
    assert "1.50 (1.50-1.50) times as fast as stock in Megatron's loop and 1.53 (1.53-1.53) times in Bridge's" in text
    assert "a difference of +1.9%" in text
    assert "| stock in Bridge's loop | 495 ms |" in text
