"""The cases that run on the virtual GPU."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.patching import around
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
from tests.features.dedup.cases import dedup
from tests.parity.gradients.variants import CAPACITY, FULL, GAPS, MLA
from tests.virtual_gpu.case import IN_ORDER, Case
from tests.virtual_gpu.pipeline import PIPELINE
from tests.virtual_gpu.programs import PROGRAMS, Program

ONE, TWO = fixed_plan(1), fixed_plan(2)
NO_DW = fixed_plan(2, DwPolicy.NONE)
PAIRED, PAIRED_NO_DW = paired(ONE), paired(fixed_plan(1, DwPolicy.NONE))
MIX = paired(ONE, TWO)
DEDUP = dedup(ONE)
TILES = [fixed_plan(1, tiles=2), fixed_plan(2, tiles=2, local_tokens=LocalTokens.AFTER)]
TWO_HOPS = [fixed_plan(count, dispatch=TWO_HOP) for count in (1, 2)]
NODES = Nodes(2, 2)
HOPS_LATE = (("between nodes",), ("inside a node",), ("compute",))
WHOLE_EXPERTS = fixed_plan(1, overlap_range=OverlapRange.EXPERTS)
FORWARD_GAPS = (
    Gap("L1.c0.F.dispatch", ("W.output_layer",)),
    Gap("L1.c0.F.combine", ("L3.W.mlp.experts.local_experts.0.linear_fc1",)),
    Gap("L2.c0.F.dispatch", ("L3.W.self_attention.linear_proj",)),
    *GAPS[2:],
)
"""dWs that run in waits of the forward paired with their backward, and in a wait of the latter."""
LATE_DW = Plan(ONE.segments, dw_window=100, gaps=(Gap("L2.c0.I.combine", ("W.output_layer",)),))
"""All dWs but one run at the end of the backward pass."""
EACH_LATE = (("compute",), ("comm",), ("counts",), ("DDP",), ("NCCL",))
"""Without a step in which no stream is late: a missing order shows in each step alike, see ``virtual_gpu/order.py``."""
COMPUTE_LATE = (("compute",),)
COMM_LATE = (("comm",),)
DDP_LATE = (("DDP",), ("NCCL",))
NCCL_LATE = (("NCCL",),)
WITHOUT_COUNTS = (*COMPUTE_LATE, *COMM_LATE, *DDP_LATE)


SMALL: dict[str, Any] = {"num_layers": 2}


def sequence(num_chunks: int = 2, over: OverlapRange = OverlapRange.STACK) -> Plan:
    return fixed_plan(num_chunks, chunk_dim=ChunkDim.SEQUENCE, overlap_range=over)


def paired_case(plans: Sequence[Plan], overrides: Mapping[str, Any] = MappingProxyType({}), **settings: Any) -> Case:
    """Steps of Megatron's schedule with a micro-batch at each end, and one that has two partners."""
    return Case(plans, dict(overrides), num_scheduled=3, **settings)


def selective(*modules: str, **overrides: Any) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules), **overrides}


SHARED: dict[str, Any] = {"moe_shared_expert_intermediate_size": 32}
WIRED: dict[str, Any] = {**SHARED, "num_layers": 2, "moe_layer_freq": [1, 0]}
PADDED: dict[str, Any] = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
LLAMA: dict[str, Any] = {"num_query_groups": 2, "position_embedding_type": "rope", "normalization": "RMSNorm"}
SEQUENCE_PARALLEL = {"sequence_parallel": True}
TP = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
EXPERT_TP = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
TE: dict[str, Any] = {"te": True, "moe_grouped_gemm": True}

CASES: dict[str, Case] = {
    "k=1": Case([fixed_plan(1)], late=EACH_LATE[:3]),
    "k=1/dw-none": Case([fixed_plan(1, DwPolicy.NONE)], switchable=True, late=EACH_LATE),
    "k=2": Case([TWO], late=EACH_LATE),
    "k=2/dw-none": Case([NO_DW], late=COMPUTE_LATE),
    "k=2/gaps": Case([Plan(TWO.segments, dw_window=4, gaps=GAPS)], late=EACH_LATE[:2]),
    "sequence": Case([sequence()], late=(("compute",), ("comm",))),
    "sequence/mla": Case([sequence()], MLA),
    **{f"over-{over}": Case([fixed_plan(2, overlap_range=over)], late=COMM_LATE) for over in list(OverlapRange)[:2]},
    "over-experts/capacity": Case([fixed_plan(2, overlap_range=OverlapRange.EXPERTS)], CAPACITY),
    "over-experts/padded": Case([fixed_plan(2, overlap_range=OverlapRange.EXPERTS)], PADDED),
    "padded/k=1": Case([fixed_plan(1, overlap_range=OverlapRange.EXPERTS)], PADDED),
    "segments": Case([Plan((Segment(1, 1, 1), Segment(2, 3, 3, ChunkDim.SEQUENCE)), dw_window=4)], late=COMM_LATE),
    "plan-switches": Case([fixed_plan(1), TWO, NO_DW, sequence(3), fixed_plan(1, DwPolicy.NONE)], switchable=True),
    "full-recompute": Case([TWO], FULL, late=COMM_LATE),
    "recompute": Case([TWO], selective("moe", "core_attn"), late=COMPUTE_LATE),
    "shared-experts": Case([TWO], SHARED, late=COMM_LATE),
    "wired-pairs/k=1": Case([ONE], WIRED, late=EACH_LATE[:3], is_wired=True),
    "wired-pairs/paired": paired_case([PAIRED], WIRED, late=COMM_LATE, is_wired=True),
    "dense-first-layer": Case([TWO], {"moe_layer_freq": [0, 1, 1]}),
    "mtp": Case([TWO], {"mtp_num_layers": 1}),
    "priority": Case([TWO], micro_op_mb=0.005, late=WITHOUT_COUNTS),
    "priority/dw-none": Case([fixed_plan(1, DwPolicy.NONE)], micro_op_mb=0.005, switchable=True, late=DDP_LATE),
    "priority/distributed-optimizer": Case([TWO], micro_op_mb=0.005, distributed_optimizer=True, late=DDP_LATE),
    "no-overlap-grad-reduce": Case([TWO], overlap_grad_reduce=False, late=COMPUTE_LATE),
    "distributed-optimizer": Case([TWO], distributed_optimizer=True, late=DDP_LATE),
    "tensor-parallel": Case([TWO], SEQUENCE_PARALLEL, layout=TP, late=COMM_LATE),
    "expert-tensor-parallel": Case(
        [TWO], SEQUENCE_PARALLEL, layout=EXPERT_TP, late=(IN_ORDER, ("comm",)), equals_stock=False
    ),
    "pipeline": Case([TWO], PIPELINE, layout={"pipeline_model_parallel_size": 2}, late=WITHOUT_COUNTS),
    "pipeline/k=1": Case([fixed_plan(1)], PIPELINE, layout={"pipeline_model_parallel_size": 2}),
    "bf16": Case([TWO], {"bf16": True}, late=COMPUTE_LATE),
    "dedup/k=1": Case([DEDUP], late=EACH_LATE[:3]),
    "dedup/k=2": Case([dedup(TWO)], late=EACH_LATE[:2]),
    "dedup/capacity": Case([dedup(WHOLE_EXPERTS)], {**CAPACITY, **selective("moe")}, late=COMM_LATE),
    "dedup/switches": paired_case([ONE, DEDUP, paired(DEDUP)], switchable=True),
    "two-hop/k=1": Case(TWO_HOPS[:1], late=HOPS_LATE, nodes=NODES),
    "two-hop/k=2": Case(TWO_HOPS[1:], late=HOPS_LATE, nodes=NODES),
    "two-hop/priority": Case(TWO_HOPS[1:], micro_op_mb=0.005, late=DDP_LATE, nodes=NODES),
    "two-hop/switches": paired_case(
        [ONE, TWO_HOPS[0], paired(TWO_HOPS[0])], switchable=True, late=HOPS_LATE[:2], nodes=NODES
    ),
    "tiles/k=1": Case(TILES[:1], late=EACH_LATE[:2]),
    "tiles/k=2": Case(TILES[1:], SHARED, late=COMM_LATE),
    "tiles/tiled/k=1": Case([fixed_plan(1, tiles=2, local_tokens=LocalTokens.TILED)], late=COMM_LATE),
    "tiles/dedup/switches": Case(
        [ONE, dedup(TILES[0]), fixed_plan(1, DwPolicy.NONE, tiles=1)], selective("moe", "core_attn"), switchable=True
    ),
    "guarded/priority": Case(
        [TWO], late=(IN_ORDER, *EACH_LATE[:3]), micro_op_mb=0.005, max_rows=40, equals_stock=False
    ),
    "guarded/dedup/paired": paired_case([paired(DEDUP)], late=(IN_ORDER, ("comm",)), max_rows=40, equals_stock=False),
    "llama-like": Case([TWO], {**LLAMA, "gated_linear_unit": True, "add_bias_linear": True}),
    "paired/k=1": paired_case([PAIRED], late=EACH_LATE),
    "paired/k=1/dw-none": paired_case([PAIRED_NO_DW], switchable=True, late=COMM_LATE),
    "paired/k=1/gaps": paired_case([paired(Plan(ONE.segments, dw_window=4, gaps=FORWARD_GAPS))], late=EACH_LATE[1:3]),
    "paired/k=2": paired_case([paired(TWO)], late=COMM_LATE),
    "paired/mix": paired_case([MIX], late=EACH_LATE[:2]),
    "paired/switches": paired_case([ONE, PAIRED, MIX, PAIRED_NO_DW, paired(sequence())], switchable=True),
    "paired/full-recompute": paired_case([PAIRED], FULL, late=(("comm",),)),
    "paired/recompute": paired_case([MIX], selective("moe", "core_attn"), late=(("compute",),)),
    "paired/capacity": paired_case([paired(WHOLE_EXPERTS)], CAPACITY, late=(("comm",),)),
    "paired/priority": paired_case([PAIRED], micro_op_mb=0.005, late=DDP_LATE),
    "paired/distributed-optimizer": paired_case([PAIRED], distributed_optimizer=True, late=NCCL_LATE),
    "graphs/k=1": Case([ONE], late=EACH_LATE, is_captured=True),
    "graphs/llama-like": Case([ONE], {**LLAMA, **SHARED, "gated_linear_unit": True}, is_captured=True),
    "graphs/sdpa": Case([replace(ONE, fused_attention=True)], LLAMA, is_captured=True, late=COMPUTE_LATE),
    "graphs/mla": Case([ONE], MLA, is_captured=True),
    "graphs/bf16": Case([ONE], {"bf16": True}, is_captured=True),
    "graphs/dense-first-layer": Case([ONE], {"moe_layer_freq": [0, 1, 1], "mtp_num_layers": 1}, is_captured=True),
    "graphs/dedup": Case([DEDUP], selective("moe"), is_captured=True, late=COMPUTE_LATE),
    "graphs/tiles": Case(TILES[:1], is_captured=True),
    "graphs/frozen": Case([ONE], {"frozen": r"embedding|layers\.0\."}, is_captured=True),
    "graphs/pipeline": Case(
        [ONE], PIPELINE, layout={"pipeline_model_parallel_size": 2}, is_captured=True, late=DDP_LATE
    ),
    "graphs/distributed-optimizer": paired_case([PAIRED], distributed_optimizer=True, is_captured=True, late=DDP_LATE),
    "graphs/paired/gaps": paired_case(
        [paired(Plan(ONE.segments, dw_window=4, gaps=FORWARD_GAPS))], late=EACH_LATE[:3], is_captured=True
    ),
    "graphs/paired/late-dw": Case([paired(LATE_DW)], SHARED, num_scheduled=5, late=COMM_LATE, is_captured=True),
    "graphs/k=2": Case([TWO], SHARED, late=EACH_LATE[:3], is_captured=True),
    "graphs/k=3/losses": Case([fixed_plan(3)], {"moe_z_loss_coeff": 1e-3}, is_captured=True),
    "graphs/segments": Case(
        [Plan((Segment(1, 1, 1), Segment(2, 3, 2)), dw_window=4)], late=COMM_LATE, is_captured=True
    ),
    "graphs/paired/k=2": paired_case([paired(TWO)], late=COMM_LATE, is_captured=True),
    "graphs/switches": paired_case([ONE, TWO, PAIRED, MIX, paired(DEDUP)], switchable=True, is_captured=True),
    "paired/tensor-parallel": paired_case([PAIRED], SEQUENCE_PARALLEL, layout=TP, late=(("comm",),)),
}
"""Cases with Megatron's local layers, by name."""

IN_THREE_LAYERS = ("gaps", "segments", "plan-switches", "dense-first-layer", "pipeline")
"""Parts of the names of cases that need, or name, a third layer; two layers show the order between layers as well."""


def in_two_layers(cases: dict[str, Case]) -> dict[str, Case]:
    """The cases, with models of two layers where that is enough."""
    return {
        name: case if {*name.split("/")} & {*IN_THREE_LAYERS} else replace(case, overrides={**SMALL, **case.overrides})
        for name, case in cases.items()
    }


TE_CASES: dict[str, Case] = {
    "te/k=1": Case([fixed_plan(1)], TE, late=COMPUTE_LATE),
    "te/paired": paired_case([PAIRED], {**TE, "bf16": True}, late=(("compute",),)),
    "te/graphs/k=1": Case([ONE], TE, is_captured=True, late=EACH_LATE[:2]),
    "te/graphs/paired": paired_case([PAIRED], {**TE, "bf16": True}, is_captured=True, late=DDP_LATE),
    "te/graphs/fused-dw": Case([ONE], {**TE, "gradient_accumulation_fusion": True}, is_captured=True),
    "te/k=2": Case([TWO], TE, late=WITHOUT_COUNTS[:3]),
    "te/fused-dw/k=2": Case([TWO], {**TE, "gradient_accumulation_fusion": True}, late=COMPUTE_LATE),
    "te/bias/k=2": Case([TWO], {**TE, "add_bias_linear": True}, late=DDP_LATE),
    # Reports at the end of the backward pass add gradients of biases on DDP's stream.
    "te/bias/no-overlap-grad-reduce": Case(
        [TWO], {**TE, "add_bias_linear": True}, overlap_grad_reduce=False, late=(IN_ORDER, ("DDP",))
    ),
    "te/sequence": Case([sequence()], TE, late=COMPUTE_LATE),
    "te/recompute/norms": Case([TWO], {**TE, **selective("layernorm", "moe_act")}, late=COMPUTE_LATE),
    "te/recompute/norms/k=1": Case([fixed_plan(1)], {**TE, **selective("layernorm", "moe_act")}),
    "te/recompute/mla": Case([TWO], {**TE, **MLA, **selective("layernorm", "moe_act", "mla_up_proj")}),
    "recompute/norms": Case([TWO], selective("layernorm"), late=COMPUTE_LATE),
}
"""Cases where Megatron finds Transformer Engine. Megatron's recompute of norms needs that, also with local layers."""

CASES, TE_CASES = in_two_layers(CASES), in_two_layers(TE_CASES)


class _Early:
    """A point in time before all kernels."""

    def block(self, stream: Any) -> None:
        """Lets ``stream`` go on."""


def local_rows_too_early(stack: ExitStack) -> None:
    """Negative control: the second hop does not wait for the kernel that makes its rows of those of the first."""
    from megatron_lancet.runtime.transport.nccl import StreamTransport

    def launch(stock: Any, transport: Any, *message: Any) -> Any:
        is_inside = transport._stream.name == "comm inside a node"
        return stock(transport, *message[:4], _Early()) if is_inside else stock(transport, *message)

    stack.enter_context(around(StreamTransport, "launch", launch))


def tiles_too_early(stack: ExitStack) -> None:
    """Negative control: a tile whose size has come with the counts does not wait for the kernel that makes its rows."""
    from megatron_lancet.runtime.transport.nccl import StreamTransport

    def launch(stock: Any, transport: Any, *message: Any) -> Any:
        return stock(transport, *message[:4], _Early() if message[4] is not None else None)

    stack.enter_context(around(StreamTransport, "launch", launch))


DAMAGED = {
    "tiles-too-early": (Case(TILES[:1], SMALL), tiles_too_early),
    "local-rows-too-early": (Case(TWO_HOPS[:1], SMALL, nodes=NODES), local_rows_too_early),
}
"""Cases in which something is wrong, and what."""

REPEATED = {"num_layers": 1, "mtp_num_layers": 2, "mtp_use_repeated_layer": True}
MUTANT_CASES: dict[str, Case | Program] = {
    "two-chunks": Case([TWO], SMALL),
    # Nothing of the first layer is kept for a backward pass, so its counts are freed in the forward pass.
    "frozen": Case([TWO], {**SMALL, "frozen": r"embedding|layers\.0\."}),
    "at-once": Case([fixed_plan(1, DwPolicy.NONE)], SMALL, switchable=True),
    "priority": Case([TWO], SMALL, micro_op_mb=0.005, late=NCCL_LATE),
    "priority-sharded": Case([TWO], SMALL, micro_op_mb=0.005, distributed_optimizer=True, late=NCCL_LATE),
    "capacity": Case([fixed_plan(2, overlap_range=OverlapRange.EXPERTS)], {**SMALL, **CAPACITY}),
    "repeated": Case([fixed_plan(1, DwPolicy.NONE)], REPEATED, switchable=True),
    "traced": Case([TWO], SMALL, is_traced=True),
    "rounds": Case([ONE], SMALL, max_rows=40, equals_stock=False),
    # Several messages wait for the same counts.
    "tiles": Case(TILES[:1], SMALL),
    "graphs": Case([ONE], SMALL, late=COMPUTE_LATE, is_captured=True),
    "tiles-in-chunks": Case(TILES[1:], SMALL),
    **PROGRAMS,
}
"""Small cases for mutants, in the order in which they are tried."""
