"""Models and plans with pairing that are compared with stock Megatron.

They are chosen by what may differ when a forward is paired with another micro-batch's backward: state that a layer
keeps from its forward to its backward, random numbers, what is logged, and when gradients are reduced.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import (
    ChunkDim,
    DwPolicy,
    Gap,
    LocalTokens,
    OverlapRange,
    Plan,
    Segment,
    fixed_plan,
    paired,
)
from tests.features.dedup import cases as dedup
from tests.parity.gradients.variants import (
    CAPACITY,
    FULL,
    HYBRID,
    MLA,
    RECOMPUTE,
    VARIANTS,
    WHOLE_ROUTING,
)

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
K1, K1_NONE = paired(fixed_plan(1)), paired(fixed_plan(1, DwPolicy.NONE))
SEQUENCE_AT_ENDS = paired(fixed_plan(1), fixed_plan(3, chunk_dim=ChunkDim.SEQUENCE))
GAPS = (
    Gap("L2.c0.F.dispatch", ("W.output_layer",)),
    Gap("L3.c0.I.dispatch", ("L3.W.self_attention.linear_proj",)),
)


class Case(NamedTuple):
    """A model, its plan and the length of its steps.

    Attributes:
        overrides: of the config, see ``gradients_worker.build``.
        plan: a plan with pairing.
        num_micro_batches: of the second of two steps, see :attr:`lengths`.
        disturbed: whether transfers seem done, or not, at random and differently on each rank.
        nodes: how expert-parallel groups lie on nodes, for two hops.
        max_rows: that a rank's experts work on at a time; None for any number.
    """

    overrides: dict[str, Any]
    plan: Plan = K1
    num_micro_batches: int = 3
    disturbed: bool = False
    nodes: Nodes | None = None
    max_rows: int | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """Micro-batches of the two steps. In the first, DDP reduces at the end: one pair shows that."""
        return min(2, self.num_micro_batches), self.num_micro_batches

    @property
    def is_exact(self) -> bool:
        """Whether the results must be stock's to the bit."""
        return self.plan.num_chunks == 1 and self.max_rows is None


_TILED = fixed_plan(1, tiles=2)
_MTP_RECOMPUTED = {**VARIANTS["mtp-2"], **FULL, **DROPOUT}
CASES: dict[str, Case] = {
    **{f"plain/M={count}": Case({}, num_micro_batches=count) for count in (1, 2, 3, 4, 8)},
    "plain/none": Case({}, K1_NONE),
    "plain/erratic-wire": Case({}, K1, 3, True),
    "plain/none/erratic-wire": Case({}, K1_NONE, 3, True),
    "plain/gaps": Case({}, paired(replace(fixed_plan(1), gaps=GAPS)), 3, True),
    "plain/dw-memory": Case({}, paired(fixed_plan(1, dw_memory_bytes=20_000)), 3, True),
    **{
        name: Case(VARIANTS[name])
        for name in (
            "two-aux-losses",
            "sigmoid-expert-bias",
            "shared-expert",
            "per-token-loss",
            "mtp-repeated",
            "frozen-router-embedding-output",
        )
    },
    "frozen-first-layer": Case({"frozen": r"embedding|layers\.0\."}),
    "dense-last-layer": Case({"moe_layer_freq": [1, 1, 0]}),
    "bf16": Case({"bf16": True}),
    "distributed-optimizer": Case({"distributed_optimizer": True}),
    "dropout": Case(DROPOUT, num_micro_batches=4),
    "full-recompute/dropout": Case({**RECOMPUTE["full-recompute"], **DROPOUT}),
    "selective-recompute/dropout": Case({**RECOMPUTE["selective-recompute"], **DROPOUT}),
    "mtp-2/full-recompute/dropout": Case(_MTP_RECOMPUTED),
    "hybrid": Case(HYBRID),
    "mla": Case(MLA),
    "capacity-probs": Case(CAPACITY),
    "capacity-padded": Case(WHOLE_ROUTING["capacity-padded"]),
    "jitter": Case(WHOLE_ROUTING["jitter"]),
    "chunks": Case(VARIANTS["two-aux-losses"], paired(fixed_plan(2))),
    "chunks/padding": Case({**VARIANTS["two-aux-losses"], "padded": True}, paired(fixed_plan(2))),
    "chunks/one-micro-batch": Case({}, paired(fixed_plan(1), fixed_plan(2)), 1),
    "chunks-at-ends": Case({}, paired(fixed_plan(1), fixed_plan(2)), 4, True),
    "chunks-in-middle": Case({}, paired(fixed_plan(3), fixed_plan(1)), 4),
    "sequence-at-ends": Case(VARIANTS["llama-like"], SEQUENCE_AT_ENDS),
    "capacity/experts-at-ends": Case(
        CAPACITY, paired(fixed_plan(1), fixed_plan(2, overlap_range=OverlapRange.EXPERTS))
    ),
    "dedup": Case({}, paired(dedup.ONE)),
    "tiles": Case({}, paired(_TILED), 3, True),
    "tiles/none/dropout": Case(
        DROPOUT, paired(fixed_plan(1, DwPolicy.NONE, tiles=1, local_tokens=LocalTokens.AFTER)), num_micro_batches=4
    ),
    "tiles/dedup/chunks-at-ends": Case({}, paired(dedup.dedup(_TILED), dedup.TWO)),
    "guarded": Case({}, K1, 3, True, max_rows=40),
    "guarded/some-chunks/chunks-at-ends": Case({}, paired(fixed_plan(1), fixed_plan(2)), 4, True, max_rows=73),
    "dedup/chunks-at-ends": Case({}, paired(dedup.ONE, dedup.TWO), 4, True),
    "segments": Case(
        {"num_moe_experts": 8},
        paired(
            Plan((Segment(1, 1, 1), Segment(2, 3, 2)), dw_window=4),
            Plan((Segment(1, 2, 3, ChunkDim.SEQUENCE), Segment(3, None, 2)), dw_window=6),
        ),
    ),
}
"""On two ranks with EP=2."""

SWITCHED = "switching"
SWITCHED_PLANS: dict[str, Plan] = {
    "paired": K1,
    "whole": fixed_plan(1),
    "paired-chunks-at-ends": paired(fixed_plan(1), fixed_plan(2)),
    "paired-none": K1_NONE,
    "chunks": fixed_plan(2),
    "paired-chunks": paired(fixed_plan(2)),
    "whole-none": fixed_plan(1, DwPolicy.NONE),
}
"""One model changes between them from step to step."""

RANDOM_IN_BACKWARD, OTHER_SAMPLES, LATE_FORWARDS, OTHER_SETTINGS = (
    "random-numbers-in-backward",
    "samples-of-another-micro-batch",
    "late-forwards-on-one-rank",
    "settings-of-an-end",
)
"""Negative controls."""

_TENSOR = {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP4": {"expert_model_parallel_size": 4},
    "EP2xTP2": {**_TENSOR, "expert_tensor_parallel_size": 1},
    "EP2xETP2": {**_TENSOR, "expert_tensor_parallel_size": 2},
    "EP2xCP2": {"expert_model_parallel_size": 2, "context_parallel_size": 2},
}
_ONE_HOPPING, _TWO_HOPPING = (fixed_plan(count, dispatch=TWO_HOP) for count in (1, 2))
IN_LAYOUTS: dict[str, tuple[str, Case]] = {
    "EP4/two-hop": ("EP4", Case({"num_moe_experts": 8}, paired(_ONE_HOPPING), nodes=Nodes(2, 2))),
    "EP4/two-hop/chunks-at-ends": (
        "EP4",
        Case({}, paired(_ONE_HOPPING, _TWO_HOPPING), 4, disturbed=True, nodes=Nodes(2, 2)),
    ),
    "EP2xTP2": ("EP2xTP2", Case({}, disturbed=True)),
    "EP2xTP2/recompute/dropout": ("EP2xTP2", Case({**RECOMPUTE["full-recompute"], **DROPOUT})),
    "EP2xTP2/distributed-optimizer/chunks-at-ends": (
        "EP2xTP2",
        Case({"distributed_optimizer": True}, paired(fixed_plan(1), fixed_plan(2))),
    ),
    "EP2xETP2": ("EP2xETP2", Case({}, disturbed=True)),
    "EP2xCP2": ("EP2xCP2", Case({}, disturbed=True)),
}
"""Cases on four ranks, each with its layout."""

_PIPELINE = {"virtual_pipeline_model_parallel_size": 2, "deallocate_pipeline_outputs": True}
PIPELINES: dict[str, dict[str, Any]] = {
    # Two stages exchange messages with each other in both directions; without overlap Megatron needs more than two.
    "EP2xPP2": {
        **_PIPELINE,
        "expert_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "num_layers": 4,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    },
    "PP4": {**_PIPELINE, "expert_model_parallel_size": 1, "pipeline_model_parallel_size": 4, "num_layers": 8},
}
"""Interleaved pipelines on four ranks: two virtual stages of a layer on each."""

_EARLY_RECEIVES = {"overlap_p2p_comm_warmup_flush": True}
_BLOCK_DROPOUT = {**RECOMPUTE["block-recompute"], **DROPOUT}
IN_PIPELINES: dict[str, tuple[str, Case]] = {
    "EP2xPP2/M=2": ("EP2xPP2", Case({}, K1, 2, True)),
    "EP2xPP2/M=4": ("EP2xPP2", Case({}, K1, 4, True)),
    "EP2xPP2/M=4/early-receives": ("EP2xPP2", Case(_EARLY_RECEIVES, K1_NONE, 4)),
    "EP2xPP2/recompute/dropout": ("EP2xPP2", Case(_BLOCK_DROPOUT, K1, 4)),
    "EP2xPP2/tiles": ("EP2xPP2", Case({}, paired(_TILED), 4)),
    "EP2xPP2/mtp-1": ("EP2xPP2", Case(VARIANTS["mtp-1"], K1, 4)),
    "EP2xPP2/chunks-at-ends": ("EP2xPP2", Case({}, paired(fixed_plan(1), fixed_plan(2)), 8, True)),
    "PP4": ("PP4", Case({}, K1, 8)),
}
"""Cases in interleaved pipelines, each with its layout."""
