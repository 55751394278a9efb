"""Chunks of which a rank would receive more rows than it may work on at a time, compared with stock."""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from megatron_lancet.patching import around
from megatron_lancet.schedule.plan import DwPolicy, OverlapRange, Plan, fixed_plan
from tests.parity.gradients.hops import two_hops
from tests.parity.gradients.variants import (
    CAPACITY,
    DEDUP_ONE,
    DEDUP_TWO,
    FORCED,
    HYBRID,
    RECOMPUTE,
    VARIANTS,
    WITH_GAPS,
)


class Guarded(NamedTuple):
    """A model, its plan, and the most rows that a rank's experts work on at a time.

    Attributes:
        overrides: of the config, see ``gradients_worker.build``.
        disturbed: whether transfers seem done, or not, at random and differently on each rank.
    """

    overrides: dict[str, Any]
    plan: Plan
    max_rows: int
    disturbed: bool = False


HOT = "guarded/all-to-one-expert/k=1"
"""All 128 rows of a micro-batch go to one of two ranks."""
HALF = "guarded/plain/some-chunks/k=2"
"""Only a part of the chunks has so many rows on a rank."""
CASES: dict[str, Guarded] = {
    "guarded/plain/k=1": Guarded({}, fixed_plan(1), 40),
    HALF: Guarded({}, fixed_plan(2), 73),
    HOT: Guarded(FORCED["all-to-one-expert"], fixed_plan(1), 16),
    "guarded/idle-rank/k=3": Guarded(FORCED["idle-rank"], fixed_plan(3), 30),
    "guarded/bf16/k=1": Guarded({"bf16": True}, fixed_plan(1), 40),
    "guarded/two-aux-losses/bias/k=1": Guarded(
        {**VARIANTS["two-aux-losses"], **VARIANTS["bias"]}, fixed_plan(1, DwPolicy.NONE), 40
    ),
    "guarded/gaps/k=2": Guarded({}, WITH_GAPS["gaps/k=2"], 30, disturbed=True),
    "guarded/shared-expert/selective-recompute/k=2": Guarded(RECOMPUTE["selective-recompute"], fixed_plan(2), 30),
    "guarded/mtp-repeated/k=2": Guarded(VARIANTS["mtp-repeated"], fixed_plan(2), 30),
    "guarded/hybrid/capacity-probs/k=3": Guarded(
        {**HYBRID, **CAPACITY}, fixed_plan(3, overlap_range=OverlapRange.EXPERTS), 10
    ),
    "guarded/plain/dedup/k=1": Guarded({}, DEDUP_ONE, 40),
    "guarded/grouped-experts-gated/dedup/k=2": Guarded(VARIANTS["grouped-experts-gated"], DEDUP_TWO, 40),
}
"""On two ranks with EP=2."""
_TOP_4 = {"num_moe_experts": 16, "moe_router_topk": 4}
IN_LAYOUTS: dict[str, tuple[str, Guarded]] = {
    "guarded/EP4/k=2": ("EP4", Guarded({}, fixed_plan(2), 13, disturbed=True)),
    "guarded/EP4/dedup/top-4/k=1": ("EP4", Guarded(_TOP_4, DEDUP_ONE, 50)),
    "guarded/EP4/two-hop/top-4/k=2": ("EP4", Guarded(_TOP_4, two_hops(fixed_plan(2)), 30, disturbed=True)),
    "guarded/EP2xETP2/k=1": ("EP2xETP2", Guarded({}, fixed_plan(1), 60)),
    "guarded/EP2xETP2/two-hop/k=1": ("EP2xETP2", Guarded({}, two_hops(fixed_plan(1)), 60)),
}
"""On four ranks, as two nodes of two; with EP2xETP2 both holders of an expert work on the rows of both."""


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
