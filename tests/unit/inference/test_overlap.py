"""Plans of an evaluation: what a checkpoint's routing allows."""

import argparse

import pytest

from megatron_lancet.errors import UsageError
from megatron_lancet.inference import overlap
from megatron_lancet.inference.overlap import evaluation_plan


@pytest.mark.parametrize(
    ("trained", "flag"),
    [
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "--moe-router-load-balancing-type sinkhorn"),
    ],
)
def test_chunks_need_routes_that_depend_on_their_own_tokens(monkeypatch, trained, flag):
    monkeypatch.setattr(overlap, "number_of_ranks", lambda: 2)
    run = argparse.Namespace(**trained)
    with pytest.raises(UsageError, match=f"--chunks 2 does not work with {flag}, with which the checkpoint was"):
        evaluation_plan(2, 0, 8, run)
    assert evaluation_plan(1, 2, 8, run).has_tiles


def test_capacity_below_0_drops_no_token(monkeypatch):
    monkeypatch.setattr(overlap, "number_of_ranks", lambda: 2)
    assert evaluation_plan(2, 0, 8, argparse.Namespace(moe_expert_capacity_factor=-1.0)).num_chunks == 2


@pytest.mark.parametrize(
    ("chunks", "tiles", "given"), [(2, 0, "--chunks 2"), (1, 2, "--tiles 2"), (2, 2, "--chunks 2 and --tiles 2")]
)
def test_shortcut_layers_are_evaluated_whole(monkeypatch, chunks, tiles, given):
    monkeypatch.setattr(overlap, "number_of_ranks", lambda: 2)
    with pytest.raises(UsageError, match=rf"^{given} can't be used: .* with --lancet-shortcut-moe, .* Drop it\.$"):
        evaluation_plan(chunks, tiles, 8, argparse.Namespace(lancet_shortcut_moe=True))
