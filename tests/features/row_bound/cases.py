"""Chunks of which a rank would receive more rows than it may work on at a time, compared with stock."""

from contextlib import ExitStack

import torch

from megatron_lancet.patching import around
from megatron_lancet.schedule.plan import DwPolicy, OverlapRange, fixed_plan
from tests.features.case import Case
from tests.features.dedup import cases as dedup
from tests.features.two_hop import cases as two_hop
from tests.parity.gradients.variants import CAPACITY, FORCED, HYBRID, RECOMPUTE, VARIANTS, WITH_GAPS

HOT = "guarded/all-to-one-expert/k=1"
"""All 128 rows of a micro-batch go to one of two ranks."""
HALF = "guarded/plain/some-chunks/k=2"
"""Only a part of the chunks has so many rows on a rank."""
CASES: dict[str, Case] = {
    "guarded/plain/k=1": Case({}, fixed_plan(1), max_rows=40),
    HALF: Case({}, fixed_plan(2), max_rows=73),
    HOT: Case(FORCED["all-to-one-expert"], fixed_plan(1), max_rows=16),
    "guarded/idle-rank/k=3": Case(FORCED["idle-rank"], fixed_plan(3), max_rows=30),
    "guarded/bf16/k=1": Case({"bf16": True}, fixed_plan(1), max_rows=40),
    "guarded/two-aux-losses/bias/k=1": Case(
        {**VARIANTS["two-aux-losses"], **VARIANTS["bias"]}, fixed_plan(1, DwPolicy.NONE), max_rows=40
    ),
    "guarded/gaps/k=2": Case({}, WITH_GAPS["gaps/k=2"], disturbed=True, max_rows=30),
    "guarded/shared-expert/selective-recompute/k=2": Case(RECOMPUTE["selective-recompute"], fixed_plan(2), max_rows=30),
    "guarded/mtp-repeated/k=2": Case(VARIANTS["mtp-repeated"], fixed_plan(2), max_rows=30),
    "guarded/hybrid/capacity-probs/k=3": Case(
        {**HYBRID, **CAPACITY}, fixed_plan(3, overlap_range=OverlapRange.EXPERTS), max_rows=10
    ),
    "guarded/plain/dedup/k=1": Case({}, dedup.ONE, max_rows=40),
    "guarded/grouped-experts-gated/dedup/k=2": Case(VARIANTS["grouped-experts-gated"], dedup.TWO, max_rows=40),
}
"""On two ranks with EP=2."""
_TOP_4 = {"num_moe_experts": 16, "moe_router_topk": 4}
IN_LAYOUTS: dict[str, Case] = {
    "guarded/EP4/k=2": Case({}, fixed_plan(2), "EP4", disturbed=True, max_rows=13),
    "guarded/EP4/dedup/top-4/k=1": Case(_TOP_4, dedup.ONE, "EP4", max_rows=50),
    "guarded/EP4/two-hop/top-4/k=2": Case(_TOP_4, two_hop.TWO, "EP4", disturbed=True, max_rows=30),
    "guarded/EP2xETP2/k=1": Case({}, fixed_plan(1), "EP2xETP2", max_rows=60),
    "guarded/EP2xETP2/two-hop/k=1": Case({}, two_hop.ONE, "EP2xETP2", max_rows=60),
}
"""On four ranks, as two nodes of two; with EP2xETP2 both holders of an expert work on the rows of both."""
OF_REPLICAS: dict[str, Case] = {
    "guarded/EP2xDP2/k=1": Case({}, fixed_plan(1), "EP2xDP2", changes_sums=True, max_rows=138),
}
"""Of two groups of ranks with the same experts, one sends more chunks in rounds than the other one."""


def rows_of_another_token(stack: ExitStack) -> None:
    """Negative control: what comes back in a round is put to the places of the same ranks' other rows."""
    from megatron_lancet.features.row_bound.rounds import Round

    def put_back(stock, one, rows, rows_n):
        stock(one, rows.roll(1, 0), rows_n)

    stack.enter_context(around(Round, "put_back", put_back))


def gradients_of_one_round(stack: ExitStack) -> None:
    """Negative control: the experts' backward runs in the first round only."""
    from megatron_lancet.features.row_bound.in_rounds import ChunkInRounds

    def gradients_of(stock, chunk, received, of_output, routes, second_run):
        is_first = routes is chunk.rounds[0].routes
        return stock(chunk, received, of_output if is_first else torch.zeros_like(of_output), routes, second_run)

    stack.enter_context(around(ChunkInRounds, "_gradients_of", gradients_of))


DAMAGED = {"rows-of-another-token": rows_of_another_token, "gradients-of-one-round": gradients_of_one_round}
