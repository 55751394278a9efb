import pytest

from megatron_lancet.planning.shares import merge_similar_shares


def test_similar_expert_shares_are_made_equal():
    shares = (0.05, 0.3, 0.1, 0.2, 0.25, 0.1)
    assert merge_similar_shares(shares, 5) == shares
    few = merge_similar_shares(shares, 3)
    assert few == pytest.approx((0.25 / 3, 0.3, 0.25 / 3, 0.225, 0.225, 0.25 / 3))
    assert len(set(few)) == 3
