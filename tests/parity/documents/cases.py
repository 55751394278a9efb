"""Models, packed samples and plans that are compared with stock."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_lancet.schedule.plan import ChunkDim, Dispatch, Plan, fixed_plan
from tests.parity.gradients.gradients_worker import plan_of
from tests.parity.gradients.variants import CAPACITY, HYBRID, MLA, RECOMPUTE, VARIANTS

type Samples = Sequence[Sequence[int]]

MIXED: Samples = ([5, 1, 3, 7], [2, 14], [16], [1] * 16)
WHOLE: Samples = ([16], [16], [16], [16])
LONG: Samples = ([1, 200, 311], [512])
"""Lengths of the documents of each sample."""
BINS: tuple[Samples, Samples] = ([[20, 3, 9]], [[1, 4]])
"""Samples of several lengths."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"expert_model_parallel_size": 2},
    "EP2xTP2": {
        "expert_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "EP2xCP2": {"expert_model_parallel_size": 2, "context_parallel_size": 2},
}


class Case(NamedTuple):
    """
    Attributes:
        overrides: of the model's settings, see ``gradients_worker.build``.
        samples: of rank 0's first micro-batch, rank 1's second one and so on.
        others: of the micro-batches between; None for the same documents in the reverse order.
        end_to_end: whether our layers get the samples one behind the other, as stock's users pass them.
        num_stages: pipeline stages, all on each rank.
    """

    overrides: dict[str, Any]
    plan: Plan
    samples: Samples = MIXED
    others: Samples | None = None
    end_to_end: bool = False
    num_stages: int = 1


def sequence(num_chunks: int, **fields: Any) -> Plan:
    return plan_of(num_chunks, dim="sequence", **fields)


ROPE = {"position_embedding_type": "rope"}
LLAMA = VARIANTS["llama-like"]
PREDICTIONS = VARIANTS["mtp-2"]
CORE_RECOMPUTE = VARIANTS["core-attention-recompute"]
MLA_ROPE = {**MLA, "rope_type": "rope"}
CASES: dict[str, dict[str, Case]] = {
    "EP2": {
        "plain/k=1": Case({}, plan_of(1)),
        "plain/k=2": Case({}, plan_of(2)),
        "plain/k=4": Case({}, plan_of(4)),
        "plain/k=2/sequence": Case({}, sequence(2)),
        "plain/k=4/sequence": Case({}, sequence(4)),
        "plain/k=3/sequence": Case({}, sequence(3)),
        "plain/k=3/sequence/gate": Case({}, sequence(3, over="gate")),
        "plain/k=2/experts": Case({}, plan_of(2, over="experts")),
        "end-to-end/k=2/sequence": Case({}, sequence(2), end_to_end=True),
        "stages/k=2/sequence": Case(LLAMA, sequence(2), num_stages=2),
        "stages/end-to-end/k=2": Case(LLAMA, plan_of(2), end_to_end=True, num_stages=2),
        "llama-like/k=1": Case(LLAMA, plan_of(1)),
        "llama-like/k=4/sequence": Case(LLAMA, sequence(4)),
        "long/k=1": Case(LLAMA, plan_of(1), LONG),
        "long/k=2": Case(LLAMA, plan_of(2), LONG),
        "long/k=4/sequence": Case(LLAMA, sequence(4), LONG),
        "mla-yarn/k=1": Case(MLA, plan_of(1)),
        "mla-yarn/k=2": Case(MLA, plan_of(2)),
        "mla-rope/k=4/sequence": Case(MLA_ROPE, sequence(4)),
        "predictions/k=1": Case(PREDICTIONS, plan_of(1)),
        "predictions/k=2/sequence": Case(PREDICTIONS, sequence(2)),
        "predictions/end-to-end/k=2": Case(PREDICTIONS, plan_of(2), end_to_end=True),
        "hybrid/k=2/sequence": Case(HYBRID, sequence(2)),
        "full-recompute/k=2/sequence": Case(RECOMPUTE["full-recompute"], sequence(2)),
        "core-recompute/k=2/sequence": Case(CORE_RECOMPUTE, sequence(2)),
        "sample-losses/k=2/sequence": Case(VARIANTS["two-aux-losses"], sequence(2)),
        "sample-losses/end-to-end/k=1": Case(VARIANTS["two-aux-losses"], plan_of(1), end_to_end=True),
        "capacity-padded/k=2/experts": Case(
            {**CAPACITY, "moe_pad_expert_input_to_capacity": True}, plan_of(2, over="experts")
        ),
        "bins/k=1": Case(LLAMA, plan_of(1), *BINS),
        "bins/k=4/sequence": Case(LLAMA, sequence(4), *BINS),
        "tiles/k=2/sequence": Case({}, fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE, tiles=2)),
        "dedup/k=2/sequence": Case({}, replace(sequence(2), dispatch=Dispatch.DEDUP)),
    },
    "EP2xTP2": {
        "plain/k=1": Case({}, plan_of(1)),
        "llama-like/k=2": Case(LLAMA, plan_of(2)),
        "mla-yarn/k=2": Case(MLA, plan_of(2)),
        "predictions/k=2": Case(PREDICTIONS, plan_of(2)),
        "sample-losses/k=2": Case(VARIANTS["two-aux-losses"], plan_of(2)),
    },
    "EP2xCP2": {
        "plain/k=1": Case({}, plan_of(1)),
        "llama-like/k=2": Case(LLAMA, plan_of(2)),
        "mla-yarn/k=2": Case(MLA, plan_of(2)),
        "core-recompute/k=2": Case(CORE_RECOMPUTE, plan_of(2)),
        "sample-losses/k=2": Case(VARIANTS["two-aux-losses"], plan_of(2)),
        "long/k=2": Case(LLAMA, plan_of(2), LONG),
    },
}
"""By layout."""
