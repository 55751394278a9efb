"""Costs of a chunk's rows with a dispatch, the same plan with another dispatch, and nodes for two hops."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_lancet import registry
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.cost_model import CostModel, DwCost
from megatron_lancet.planning.simulation.rows import Chunk, RowCounts, Rows
from megatron_lancet.schedule.dispatch import Dispatch, LocalTokens
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import Op, OpKind, Phase, Verb
from megatron_lancet.schedule.plan import DwPolicy, Gap, Plan, Segment


class DispatchCosts:
    """Rows of the ops and of the messages of a dispatch; here of the plain one.

    Ops have the times that were measured with the dispatch. Where none were, they have the plain one's: what the sender
    no longer copies the receiver does, when it makes the rows of its experts and sums their outputs, so that each moves
    about as many rows as before. No op is longer or shorter by more than the copy of the rows that are saved.
    """

    def __init__(self, dispatch: Dispatch, counts: RowCounts) -> None:
        self.dispatch = dispatch
        self.counts = counts
        self.costs: CostModel = counts.costs
        self.model = counts.costs.model

    @staticmethod
    def part_of_bytes(profile: Profile) -> float | None:
        """Bytes of messages over plain messages' bytes, for the kind of message with the largest ratio.

        None if they go other ways, so that bytes alone do not decide which dispatch is faster.
        """
        return 1.0

    def row_bytes(self, kind: OpKind) -> int:
        """Bytes of one row of a message with the experts' inputs, or with their gradients."""
        return self.model.row_bytes

    def rows(self, verb: Verb, chunk: Chunk) -> Rows:
        """Rows of a message."""
        return self.counts.sent(chunk)

    def op_rows(self, verb: Verb, chunk: Chunk) -> Sequence[float] | None:
        """Rows that a compute op works on, by simulated rank; None for the chunk's tokens."""
        return self.counts.received(chunk) if verb.kind is OpKind.EXPERTS else None

    def op_ms(self, layer: LayerKind, kind: OpKind, phase: Phase, chunk: Chunk, rows: float) -> float:
        """Time of a compute op on a number of rows."""
        cut = chunk.cut
        return self.costs.op_ms(layer, kind, phase, cut.dim, cut.num_chunks, chunk.number, rows, self.dispatch)

    def weight_grads(
        self, layer: LayerKind, verb: Verb, chunk: Chunk, rows: Sequence[float]
    ) -> tuple[tuple[DwCost, ...], ...]:
        """Weight gradients that become ready in the backward of a compute op, by simulated rank."""
        return tuple(self.costs.weight_grads(layer, verb.kind, chunk.cut.num_chunks, number) for number in rows)

    def rows_per_plain_row(self, kind: OpKind) -> Sequence[float]:
        """For each simulated rank, rows of an op over the rows of the similar plain op; see ``similar_ops``."""
        raise AssertionError(f"{self.dispatch} has no op {kind}")


def costs_of(dispatch: Dispatch, counts: RowCounts) -> DispatchCosts:
    """The costs of a dispatch."""
    made: DispatchCosts = registry.load(dispatch.costs)(dispatch, counts)
    return made


def part_of_bytes(dispatch: Dispatch, profile: Profile) -> float | None:
    """See :meth:`DispatchCosts.part_of_bytes`."""
    part: float | None = registry.load(dispatch.costs).part_of_bytes(profile)
    return part


def with_dispatch(plan: Plan, dispatch: Dispatch) -> Plan:
    """The same plan with another dispatch.

    It has tiles if that one can have some. The window of deferred weight gradients stays as many layers long. Weight
    gradients that are planned for a message are planned for the one that takes its place; what is planned for one that
    has no such place, such as one of a tile or inside a node, is left out.
    """
    kinds = {plan.dispatch.messages[kind]: other for kind, other in dispatch.messages.items()}
    is_alike = all(kind is other for kind, other in kinds.items())

    def moved(gaps: tuple[Gap, ...]) -> tuple[Gap, ...]:
        return gaps if is_alike else tuple(_moved(gaps, kinds))

    def window(num_all_to_alls: int, segments: tuple[Segment, ...]) -> int:
        least = 1 if plan.dw_policy is DwPolicy.FILL else 0
        before = max(segment.all_to_alls_per_layer(plan.dispatch) for segment in segments)
        after = max(segment.all_to_alls_per_layer(dispatch) for segment in fitting(segments))
        return max(least, num_all_to_alls * after // before)

    def fitting(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        if dispatch.can_tile:
            return segments
        return tuple(replace(segment, tiles=0, local_tokens=LocalTokens.HALF) for segment in segments)

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


def _moved(gaps: Sequence[Gap], kinds: Mapping[OpKind, OpKind]) -> Iterator[Gap]:
    for gap in gaps:
        op = Op.parse(gap.op)
        if op.kind in kinds and op.tile is None:
            yield replace(gap, op=str(op.with_kind(kinds[OpKind(op.kind)])))


def nodes_of_group(ep_size: int, expert_tp_size: int, ranks_per_node: int) -> Nodes | str:
    """How expert-parallel groups lie on nodes, or as the end of a sentence why they can't use two hops.

    Megatron numbers the ranks that hold all experts once one after the other, whatever else is parallel.

    Args:
        ep_size: ranks of an expert-parallel group.
        expert_tp_size: ranks that hold the parts of the same experts.
        ranks_per_node: ranks of a node, of all groups.
    """
    size = ep_size * expert_tp_size
    what = f"{size} ranks hold all experts once" if expert_tp_size > 1 else f"an expert-parallel group has {size} ranks"
    if size <= ranks_per_node and ranks_per_node % size == 0:
        return f"{what}, and a node has {ranks_per_node}, so nothing leaves a node"
    if size % ranks_per_node:
        return f"{what}, which do not fill nodes of {ranks_per_node}"
    if ranks_per_node % expert_tp_size:
        return f"the {expert_tp_size} expert-TP ranks of an expert are not on one node of {ranks_per_node} ranks"
    if ranks_per_node == 1:
        return "a node has one rank, so no node gets a token for several of its ranks"
    return Nodes(size // ranks_per_node, ranks_per_node // expert_tp_size)
