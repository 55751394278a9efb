"""What all-to-alls may carry in a layout."""

from dataclasses import replace

from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import Op, OpKind
from megatron_lancet.schedule.plan import Dispatch, DwPolicy, Gap, OwnRows, Plan, Segment

_NODE_KINDS = {OpKind.DISPATCH: OpKind.NODE_DISPATCH, OpKind.COMBINE: OpKind.NODE_COMBINE}
_WHOLE_KINDS = {node: whole for whole, node in _NODE_KINDS.items()}


def why_not_dedup(ep_size: int, num_experts: int, topk: int, pads_to_capacity: bool) -> str | None:
    """Why a run can't use deduplicated dispatch, as the end of a sentence; None if it can.

    Args:
        ep_size: number of ranks that share the experts.
        num_experts: experts of a MoE layer, on all ranks; 0 for a model without experts.
        topk: experts of a token.
        pads_to_capacity: whether routers give every expert equally many rows of a micro-batch.
    """
    if num_experts < 1:
        return "the model has no experts"
    if ep_size <= 1:
        return "there is one expert-parallel rank, so nothing is sent"
    if topk <= 1:
        return "a token has one expert (top-1), so no rank gets it twice"
    if num_experts <= ep_size:
        return "a rank has one expert, so no rank gets a token twice"
    if pads_to_capacity:
        return "experts' inputs are padded to capacity, and padded rows belong to no rank's tokens"
    return None


def why_not_two_hop(
    nodes: Nodes | str | None, ep_size: int, num_experts: int, topk: int, pads_to_capacity: bool
) -> str | None:
    """Why a run can't dispatch in two hops, as the end of a sentence; None if it can.

    Args:
        nodes: how expert-parallel groups lie on nodes, or why they don't lie on several, see
            :func:`~megatron_lancet.schedule.nodes.nodes_of_group`; None where it is unknown.
        ep_size: number of ranks that share the experts.
        num_experts: experts of a MoE layer, on all ranks; 0 for a model without experts.
        topk: experts of a token.
        pads_to_capacity: whether routers give every expert equally many rows of a micro-batch.
    """
    if num_experts < 1:
        return "the model has no experts"
    if ep_size <= 1:
        return "there is one expert-parallel rank, so nothing is sent"
    if topk <= 1:
        return "a token has one expert (top-1), so no node gets it twice"
    if pads_to_capacity:
        return "experts' inputs are padded to capacity, and padded rows belong to no rank's tokens"
    if nodes is None:
        return "it is not known which ranks share a node"
    return nodes if isinstance(nodes, str) else None


def is_evident(dispatch: Dispatch, nodes: Nodes | None, ep_size: int, num_experts: int, topk: int) -> bool:
    """Whether nobody expects a dispatch in a layout: it removes duplicates, and there are none.

    Args:
        nodes: how expert-parallel groups lie on nodes; None if they don't lie on several, or if that is unknown.
    """
    if dispatch is Dispatch.TWO_HOP and nodes is None:
        return True
    return dispatch is not Dispatch.PLAIN and (num_experts < 1 or ep_size <= 1 or topk <= 1)


def with_dispatch(plan: Plan, dispatch: Dispatch) -> Plan:
    """The same plan with another dispatch.

    Two hops have no tiles. The window of deferred weight gradients stays as many layers long. Weight gradients that are
    planned for a message are planned for the one between nodes if it becomes two hops; what is planned for one inside a
    node, or for one of a tile, is left out.
    """
    kinds: dict[OpKind, OpKind] = {}
    if plan.dispatch.all_to_alls_per_layer != dispatch.all_to_alls_per_layer:
        kinds = _NODE_KINDS if dispatch is Dispatch.TWO_HOP else _WHOLE_KINDS

    def moved(gaps: tuple[Gap, ...]) -> tuple[Gap, ...]:
        if not kinds:
            return gaps
        ops = [(Op.parse(gap.op), gap) for gap in gaps]
        known = {kind.value: other for kind, other in kinds.items()}
        return tuple(
            replace(gap, op=str(op.with_kind(known[op.kind])))
            for op, gap in ops
            if op.kind in known and op.tile is None
        )

    def window(num_all_to_alls: int, segments: tuple[Segment, ...]) -> int:
        least = 1 if plan.dw_policy is DwPolicy.FILL else 0
        before = max(segment.all_to_alls_per_layer(plan.dispatch) for segment in segments)
        after = max(segment.all_to_alls_per_layer(dispatch) for segment in fitting(segments))
        return max(least, num_all_to_alls * after // before)

    def fitting(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        if dispatch is not Dispatch.TWO_HOP:
            return segments
        return tuple(replace(segment, tiles=0, own_rows=OwnRows.HALF) for segment in segments)

    pairing = plan.pairing
    if pairing is not None:
        pairing = replace(
            pairing,
            end_segments=fitting(pairing.end_segments),
            end_dw_window=window(pairing.end_dw_window, pairing.end_segments),
            end_gaps=moved(pairing.end_gaps),
        )
    return replace(
        plan,
        segments=fitting(plan.segments),
        dw_window=window(plan.dw_window, plan.segments),
        gaps=moved(plan.gaps),
        pairing=pairing,
        dispatch=dispatch,
    )
