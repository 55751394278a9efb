"""The study of orders of reductions: its bound, and what must hold between orders."""

import pytest

from benchmarks.priority.orders import ENDS, LAYOUTS, delays_ms, filled_ms, profile_without_gradients


@pytest.mark.parametrize(
    ("ready", "busy", "end_ms"),
    [
        ([(1.0, 2.0)], [], 3.0),
        ([(1.0, 2.0)], [(3.0, 9.0)], 3.0),
        ([(1.0, 3.0)], [(3.0, 9.0)], 10.0),
        ([(4.0, 3.0)], [(3.0, 6.0), (5.0, 9.0)], 12.0),
        ([(0.0, 3.0), (1.0, 1.0)], [(2.0, 4.0)], 6.0),
        ([(0.0, 1.0), (7.0, 1.0)], [(2.0, 4.0)], 8.0),
    ],
)
def test_reductions_fill_the_gaps_of_a_link(ready, busy, end_ms):
    assert filled_ms(ready, busy) == pytest.approx(end_ms)


@pytest.mark.parametrize("bucket_layers", [1, 100])
@pytest.mark.parametrize("layout", LAYOUTS[::7], ids=str)
@pytest.mark.parametrize("ends", ENDS)
def test_no_order_is_faster_than_the_bound(ends, layout, bucket_layers):
    delays = delays_ms(profile_without_gradients(0.45, 0.1), ENDS[ends], layout, bucket_layers)
    assert delays["bound"] == pytest.approx(min(delays.values()), abs=1e-6)
    assert delays["bound"] >= -1e-6
    if bucket_layers > 1 and layout.expert_ranks == 1:  # complete when only the embedding's backward is left
        assert delays["ddp"] == pytest.approx(delays["bound"])


def test_parts_in_all_gaps_reach_the_bound_where_they_fill_them():
    """One chunk, and a layer's reduction takes about as long as its two gaps."""
    (layout,) = (one for one in LAYOUTS if (one.dense, one.is_bf16, one.ranks, one.expert_ranks) == (1.0, False, 2, 1))
    delays = delays_ms(profile_without_gradients(0.45, 0.1), ENDS["k1"], layout, 1)
    assert delays["gaps"] == pytest.approx(delays["bound"])
    assert delays["ddp"] - delays["gaps"] == pytest.approx(6.76, abs=0.01)
    assert delays["lina"] > delays["gaps"] + 6.7
