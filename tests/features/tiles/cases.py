"""Models whose rows go to other ranks in tiles, and what damages them."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.patching import around, replaced
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, LocalTokens, OverlapRange, Plan, Segment, fixed_plan
from tests.features.case import Case
from tests.parity.gradients.variants import CAPACITY, FORCED, FULL, MLA, RECOMPUTE, VARIANTS, WHOLE_ROUTING

HALF, AFTER, TILED = LocalTokens


def _tiled(tiles: int, local_tokens: LocalTokens, num_chunks: int = 1, **fields: Any) -> Plan:
    return fixed_plan(num_chunks, tiles=tiles, local_tokens=local_tokens, **fields)


TWO = _tiled(2, HALF)
_WHOLE_EXPERTS = _tiled(2, HALF, overlap_range=OverlapRange.EXPERTS)
_EIGHT_SEQUENCE: dict[str, Any] = {"chunk_dim": ChunkDim.SEQUENCE, "overlap_range": OverlapRange.EXPERTS}
_DEDUP: dict[str, Any] = {"dispatch": DEDUP}
_MIXED = Plan(
    (Segment(1, 1, 1, tiles=2), Segment(2, 2, 1), Segment(3, None, 2, tiles=1, local_tokens=AFTER)), dw_window=5
)

# GEMMs of parts of the rows give the bits of all rows at these widths, and a dW is one GEMM over all of them.
CASES: dict[str, Case] = {
    **{f"tiles-{t}-{own}/k=1": Case({}, _tiled(t, own)) for t in (1, 2, 4) for own in LocalTokens},
    "tiles-2-half/k=2": Case({}, _tiled(2, HALF, 2), disturbed=True),
    "tiles-1-after/k=2": Case({}, _tiled(1, AFTER, 2)),
    "tiles-4-after/k=2": Case({}, _tiled(4, AFTER, 2)),
    "tiles-3-tiled/k=2": Case({}, _tiled(3, TILED, 2), disturbed=True),
    "tiles-2-half/k=3/sequence": Case({}, _tiled(2, HALF, 3, chunk_dim=ChunkDim.SEQUENCE)),
    "tiles-2-half/k=3/gate": Case({}, _tiled(2, HALF, 3, overlap_range=OverlapRange.GATE)),
    "shared-expert/tiles-2-half/k=1": Case(VARIANTS["shared-expert"], TWO),
    "idle-expert/tiles-4-half/k=1": Case(FORCED["idle-expert"], _tiled(4, HALF)),
    "idle-expert/tiles-2-tiled/k=1": Case(FORCED["idle-expert"], _tiled(2, TILED)),
    "idle-rank/tiles-2-after/k=1": Case(FORCED["idle-rank"], _tiled(2, AFTER)),
    "all-to-one-expert/tiles-2-after/k=3": Case(FORCED["all-to-one-expert"], _tiled(2, AFTER, 3)),
    "capacity-probs/tiles-2-half/k=1": Case(CAPACITY, _WHOLE_EXPERTS),
    "capacity-padded/tiles-2-half/k=1": Case(WHOLE_ROUTING["capacity-padded"], _WHOLE_EXPERTS),
    # Four of a micro-batch's tokens are left: most tiles have one row or none.
    "capacity-of-one/tiles-4-half/k=8": Case(
        {"moe_expert_capacity_factor": 0.01}, _tiled(4, HALF, 8, **_EIGHT_SEQUENCE)
    ),
    "full-recompute/tiles-2-half/k=1": Case(FULL, TWO),
    "selective-recompute/tiles-2-half/k=1": Case(RECOMPUTE["selective-recompute"], TWO),
    "dropout/tiles-2-half/k=1": Case({"hidden_dropout": 0.1, "attention_dropout": 0.1}, TWO),
    "mtp-repeated/tiles-2-half/k=1": Case(VARIANTS["mtp-repeated"], TWO),
    "mla/tiles-2-half/k=1": Case(MLA, TWO),
    "two-aux-losses/tiles-1-half/k=1": Case(VARIANTS["two-aux-losses"], _tiled(1, HALF)),
    # Gradients of biases are sums over parts; a frozen layer has Megatron's own GEMMs of each part.
    "bias/tiles-2-half/k=1": Case(VARIANTS["bias"], TWO, changes_sums=True),
    "frozen-half-of-the-linears/tiles-2-half/k=1": Case(VARIANTS["frozen-half-of-the-linears"], TWO, changes_sums=True),
    # Activations round some elements otherwise, which ones depends on a tensor's size.
    "grouped-experts-gated/tiles-2-half/k=1": Case(VARIANTS["grouped-experts-gated"], TWO, changes_sums=True),
    "bf16/tiles-2-half/k=1": Case({"bf16": True}, TWO),
    "dw-none/tiles-2-half/k=1": Case({}, _tiled(2, HALF, dw_policy=DwPolicy.NONE)),
    "dw-memory/tiles-2-half/k=1": Case({}, _tiled(2, HALF, dw_memory_bytes=20_000)),
    "dedup/tiles-2-half/k=1": Case({}, _tiled(2, HALF, **_DEDUP)),
    "dedup/tiles-2-tiled/k=1": Case({}, _tiled(2, TILED, **_DEDUP)),
    "dedup/tiles-4-after/k=2": Case({"num_moe_experts": 8}, _tiled(4, AFTER, 2, **_DEDUP), disturbed=True),
    "segments/mixed-tiles": Case({}, _MIXED),
}
IN_LAYOUTS: dict[str, Case] = {
    "EP4/tiles-4-after/k=1": Case({"num_moe_experts": 8}, _tiled(4, AFTER), disturbed=True, layout="EP4"),
    "EP4/dedup/tiles-2-half/k=2": Case({"num_moe_experts": 8}, _tiled(2, HALF, 2, **_DEDUP), layout="EP4"),
    "EP2xDP2/distributed-optimizer/tiles-2-half/k=1": Case(
        {"distributed_optimizer": True}, TWO, disturbed=True, layout="EP2xDP2"
    ),
    "EP2xTP2/dropout/tiles-2-half/k=1": Case({"hidden_dropout": 0.1, "attention_dropout": 0.1}, TWO, layout="EP2xTP2"),
    "EP2xETP2/tiles-2-half/k=1": Case({}, TWO, layout="EP2xETP2"),
    "EP2xETP2/tiles-2-tiled/k=1": Case({}, _tiled(2, TILED), layout="EP2xETP2"),
    "EP2xCP2/tiles-1-after/k=2": Case({}, _tiled(1, AFTER, 2), layout="EP2xCP2"),
}
SWITCHED: dict[str, Plan] = {
    "whole-tiles": TWO,
    "whole": fixed_plan(1),
    "batch-tiles": _tiled(1, AFTER, 2),
    "whole-tiles-none": _tiled(4, HALF, dw_policy=DwPolicy.NONE),
    "whole-dedup-tiles": replace(TWO, dispatch=DEDUP),
}


def rows_of_the_last_part_lost(stack: ExitStack) -> None:
    """Negative control: a dW lacks the rows of a part."""
    from megatron_lancet.features.tiles import weight_grads

    stack.enter_context(around(weight_grads, "pieces_of", lambda stock, rows_oS: stock(rows_oS[:-1])))


def rows_come_back_to_others(stack: ExitStack) -> None:
    """Negative control: what comes back is joined one row off."""
    from megatron_lancet.features.tiles.chunk import ChunkInParts

    stack.enter_context(around(ChunkInParts, "joined", lambda stock, parts: torch.roll(stock(parts), 1, 0)))


def rows_by_part(stack: ExitStack) -> None:
    """Negative control: a dW's rows are in the order in which parts come, and not in that of their sources."""
    from megatron_lancet.features.tiles import weight_grads
    from megatron_lancet.features.tiles.weight_grads import Piece

    def pieces_of(rows_oS):
        return [Piece(part, 0, sum(of_part)) for part, of_part in enumerate(rows_oS) if sum(of_part)]

    stack.enter_context(replaced(weight_grads, "pieces_of", pieces_of))


DAMAGED: dict[str, Callable[[ExitStack], None]] = {
    "tiles/rows-of-the-last-part-lost": rows_of_the_last_part_lost,
    "tiles/rows-come-back-to-others": rows_come_back_to_others,
}
