"""Converts a profile to another cluster, layout or routing.

Conversion of the parts:

- **messages**: a rank sends (ep - 1) / ep of its routed rows when routing is even, or by deduplicated dispatch the
  expected number of distinct ones (``planning/distinct_rows.py``); rows recorded in the profile hold for its own layout
  only. The table of all-to-all times is computed from the cluster's two levels. If neither bandwidths nor latencies are
  given, groups of the measured size keep the measured curve, and for others a latency and a bandwidth are fitted to it.
- **two hops**: a cluster's nodes say how the groups lie on them, and its two levels give the times of both hops. Times
  of the ops between hops hold for the profiled nodes only; for others they are estimated, see
  :class:`~megatron_lancet.planning.dispatch.DispatchCosts`.
- **experts**: with even routing a rank receives as many rows as it has itself, for any group size. The effect of fewer
  experts with more rows each is left out.
- **gradients**: an expert's weights are on one rank of each group, so a rank holds 1 / ep of them. Ring all-reduce of
  the dense weights over all ranks of a stage, and of expert weights over their replicas. The profile's ``rest_ms``
  holds the profiled run's, so only the difference is added. Nothing of it is hidden, unless the profile says
  that gradients are reduced during the backward pass: then the simulator shows what stays.
- **pipeline**: layers are split evenly; multi-token predictions stay behind the last one. 1F1B: (m + p - 1) times the
  slowest stage's micro-batch, m micro-batches, p stages (Narayanan et al., "Efficient Large-Scale Language Model
  Training on GPU Clusters", 2021, section 2.2.1), which is what the simulator computes, and two passes of p - 1
  messages with activations. A stage is a block of neighbouring ranks.

Left out: contention between groups, other jobs, stragglers, the optimizer's share in a larger or smaller rank. Tensor
and context parallelism stay as profiled; in the gradients' rings their ranks count as data-parallel ones.
"""

import dataclasses
from dataclasses import dataclass

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.what_if.cluster import Cluster
from megatron_lancet.planning.dispatch import nodes_of_group
from megatron_lancet.planning.link_times import LinkTimes
from megatron_lancet.planning.profile import ModelFacts, Profile
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import OpKind

_TABLE_STEPS = 4
"""Factor between neighbouring message sizes of a computed table."""
_SMALLEST_MESSAGE_BYTES = 1024
_BETWEEN_HOPS = (OpKind.NODE_ROWS, OpKind.NODE_SUMS)


@dataclass(frozen=True)
class Layout:
    """Parallel sizes, network and routing of a run.

    Attributes:
        world_size: number of ranks.
        ep_size: number of ranks that share the experts.
        pp_size: number of pipeline stages.
        num_micro_batches: micro-batches of a step on each pipeline.
        cluster: the network; None for measured message times.
        received_share: share of routed rows of each rank of the expert-parallel group; sums to 1.
    """

    world_size: int
    ep_size: int
    pp_size: int
    num_micro_batches: int
    cluster: Cluster | None
    received_share: tuple[float, ...]

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks that hold the same layers."""
        return self.world_size // self.pp_size


def check_layout(layout: Layout, profile: Profile) -> None:
    """Refuses an impossible layout.

    Raises:
        UsageError: the sizes do not divide each other.
    """
    if layout.world_size < 1:
        raise UsageError("a layout has at least one rank")
    facts = profile.model
    experts, layers = facts.num_experts, len(facts.layer_kinds) - facts.num_mtp_layers
    if layout.ep_size > 1 and experts % layout.ep_size:
        raise UsageError(f"EP size {layout.ep_size} does not divide the {experts} experts of the profiled model")
    if layout.pp_size > layers:
        raise UsageError(f"{layout.pp_size} pipeline stages are more than the {layers} layers of the profiled model")
    if layout.world_size % (layout.pp_size * layout.ep_size * facts.expert_tp_size):
        tensor = f" x {facts.expert_tp_size} expert-tensor-parallel ranks" if facts.expert_tp_size > 1 else ""
        raise UsageError(
            f"{layout.world_size} ranks are no multiple of EP size {layout.ep_size}{tensor} x {layout.pp_size} "
            "pipeline stages. Choose other sizes"
        )


def in_layout(profile: Profile, layout: Layout) -> Profile:
    """The profile with the layout's stages, links, shares and weights; ``rest_ms`` and the profiled layout stay."""
    before = profile.model
    as_measured = (layout.ep_size, layout.received_share) == (before.ep_size, profile.received_share)
    facts = dataclasses.replace(
        before,
        ep_size=layout.ep_size,
        world_size=layout.world_size,
        num_micro_batches=layout.num_micro_batches,
        stage_of_layer=stages_of_layers(before, layout.pp_size),
        nodes=_nodes(before, layout),
    )
    weight_grads = tuple(
        dataclasses.replace(grad, weight_bytes=round(grad.weight_bytes * before.ep_size / layout.ep_size))
        if grad.after == OpKind.EXPERTS
        else grad
        for grad in profile.weight_grads
    )
    ops, routing = profile.ops, profile.routing if as_measured else ()
    if facts.nodes != before.nodes:
        ops = tuple(op for op in ops if op.kind not in _BETWEEN_HOPS)
        routing = tuple(dataclasses.replace(chunk, hops=None) for chunk in routing)
    return dataclasses.replace(
        profile,
        model=facts,
        expert_load=profile.expert_load if layout.ep_size == before.ep_size else None,  # which has rows of each rank
        ops=ops,
        weight_grads=weight_grads,
        link=_link(profile, layout, facts.nodes),
        received_share=layout.received_share,
        routing=routing,
    )


def why_not_several_nodes(facts: ModelFacts, layout: Layout) -> str | None:
    """Why the expert-parallel groups of a layout don't lie on several nodes of its cluster; None if they do.

    Args:
        facts: the profiled model.
    """
    nodes = _nodes_of_cluster(facts, layout)
    return nodes if isinstance(nodes, str) else None


def _nodes(facts: ModelFacts, layout: Layout) -> Nodes | None:
    """How the layout's expert-parallel groups lie on nodes: by its cluster, without one by the profile."""
    nodes = _nodes_of_cluster(facts, layout)
    return nodes if isinstance(nodes, Nodes) else None


def _nodes_of_cluster(facts: ModelFacts, layout: Layout) -> Nodes | str:
    if layout.cluster is None:
        if layout.ep_size == facts.ep_size and facts.nodes is not None:
            return facts.nodes
        return "the profile does not say that the ranks are on several nodes"
    return nodes_of_group(layout.ep_size, facts.expert_tp_size, layout.cluster.ranks_per_node)


def _link(profile: Profile, layout: Layout, nodes: Nodes | None) -> LinkTimes:
    """Times of messages between the ranks of the layout's expert-parallel groups."""
    if layout.cluster is None or layout.ep_size == 1:
        return profile.link
    facts = dataclasses.replace(profile.model, ep_size=layout.ep_size, nodes=nodes)
    return times_of_messages(facts, layout.cluster, profile.link)


def times_of_messages(facts: ModelFacts, cluster: Cluster, link: LinkTimes) -> LinkTimes:
    """Computed times of messages between the ranks of an expert-parallel group; the rest is taken from ``link``."""
    sizes = _table_sizes(_largest_message(facts))
    # The expert-TP ranks of an expert are neighbours, so fewer ranks of the group share a node.
    holders = facts.expert_tp_size
    cluster = dataclasses.replace(cluster, ranks_per_node=max(1, cluster.ranks_per_node // holders))
    table = tuple((num_bytes, cluster.all_to_all_ms(num_bytes, facts.ep_size)) for num_bytes in sizes)
    between_nodes: tuple[tuple[int, float], ...] = ()
    inside_node: tuple[tuple[int, float], ...] = ()
    if (nodes := facts.nodes) is not None:
        on_node = nodes.ranks_per_node * holders
        between_nodes = tuple((num_bytes, cluster.between_nodes_ms(num_bytes, nodes.num_nodes)) for num_bytes in sizes)
        inside_node = tuple((num_bytes, cluster.inside_node_ms(num_bytes, on_node)) for num_bytes in sizes)
    return dataclasses.replace(
        link,
        all_to_all=table,
        queued=(),
        counts_ms=cluster.all_to_all_ms(facts.counts_bytes, facts.ep_size),
        between_nodes=between_nodes,
        between_nodes_queued=(),
        inside_node=inside_node,
        inside_node_queued=(),
    )


def _table_sizes(largest: float) -> list[int]:
    """Message sizes of a table in bytes, up to at least ``largest``."""
    sizes = [_SMALLEST_MESSAGE_BYTES, _SMALLEST_MESSAGE_BYTES * _TABLE_STEPS]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] * _TABLE_STEPS)
    return sizes


def _largest_message(facts: ModelFacts) -> int:
    return facts.num_rows * max(facts.row_bytes, facts.combine_row_bytes) * facts.ep_size


def times_of_reductions(
    link: LinkTimes, cluster: Cluster, largest: float, num_ranks: int, stride: int = 1
) -> LinkTimes:
    """``link`` with computed times of all-reduces of every ``stride``-th rank, ``num_ranks`` in all.

    Args:
        largest: most bytes of a reduction.
    """
    sizes = _table_sizes(largest)
    table = tuple((size, cluster.all_reduce_ms(size, num_ranks, stride)) for size in sizes)
    return dataclasses.replace(link, all_reduce=table)


def gradient_ms(profile: Profile, layout: Layout, cluster: Cluster) -> float:
    """Time of the ring all-reduces of the fullest stage's gradients.

    Args:
        profile: the measured profile.
    """
    stride = layout.ep_size * profile.model.expert_tp_size
    replicas = layout.ranks_per_stage // stride
    return max(
        cluster.all_reduce_ms(dense, layout.ranks_per_stage) + cluster.all_reduce_ms(experts, replicas, stride=stride)
        for dense, experts in gradient_bytes(profile, layout)
    )


def gradient_bytes(profile: Profile, layout: Layout) -> list[tuple[float, float]]:
    """Bytes of gradients on a rank of each stage: (dense, experts). Norms, routers and embeddings are left out.

    Args:
        profile: the measured profile.
    """
    facts, per_layer = profile.model, _weight_bytes(profile, layout.ep_size)
    stage_of = stages_of_layers(facts, layout.pp_size)
    kinds_of: dict[int, list[LayerKind]] = {stage: [] for stage in stage_of}
    for number, (kind, stage) in enumerate(zip(facts.layer_kinds, stage_of, strict=True), start=1):
        if facts.owner_of_weights(number) == number:
            kinds_of[stage] += [kind, LayerKind.MTP] if number in facts.mtp_layers else [kind]
    kinds_of[stage_of[-1]].append(LayerKind.NONE)  # the head
    return [
        (sum(per_layer[kind][0] for kind in of_stage), sum(per_layer[kind][1] for kind in of_stage))
        for of_stage in kinds_of.values()
    ]


def with_moved_reduction(profile: Profile, moved: Profile, layout: Layout, cluster: Cluster | None) -> Profile:
    """``moved`` with its gradients summed by the layout's ranks.

    Args:
        profile: the measured profile.
        moved: the result of :func:`in_layout`.
        cluster: the network; None for measured times of reductions.
    """
    rules, before = profile.gradients, profile.model
    if rules is None:
        return moved
    ranks_before = before.world_size // len(set(before.stage_of_layer))
    dense = max(1, rules.dense_ranks * layout.ranks_per_stage // ranks_before)
    experts = max(1, rules.expert_ranks * layout.ranks_per_stage * before.ep_size // (ranks_before * layout.ep_size))
    link = moved.link
    if cluster is not None:
        largest = max(max(stage) for stage in gradient_bytes(profile, layout))
        link = times_of_reductions(link, cluster, max(largest, rules.bucket_bytes), dense)
    moved_rules = dataclasses.replace(rules, dense_ranks=dense, expert_ranks=experts)
    return dataclasses.replace(moved, link=link, gradients=moved_rules)


def _weight_bytes(profile: Profile, ep_size: int) -> dict[LayerKind, tuple[float, float]]:
    """Bytes of gradients of a layer of each kind on a rank: (dense, experts)."""
    found = {(grad.layer_kind, grad.name): grad for grad in profile.weight_grads}
    per_layer = dict.fromkeys(LayerKind, (0.0, 0.0))
    for (kind, _), grad in found.items():
        dense, experts = per_layer[kind]
        if grad.after == OpKind.EXPERTS:
            experts += grad.weight_bytes * profile.model.ep_size / ep_size
        else:
            dense += grad.weight_bytes
        per_layer[kind] = (dense, experts)
    return per_layer


def stages_of_layers(facts: ModelFacts, num_stages: int) -> tuple[int, ...]:
    """The stage of each layer: as profiled if the number of stages is the same, else split evenly."""
    if num_stages == len(set(facts.stage_of_layer)):
        return facts.stage_of_layer
    ranges = stage_ranges(len(facts.layer_kinds) - facts.num_mtp_layers, num_stages)
    stages = [stage for stage, (first, last) in enumerate(ranges) for _ in range(first, last + 1)]
    return (*stages, *stages[-1:] * facts.num_mtp_layers)


def stage_ranges(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """First and last layer of each stage, from 1, as even as possible, larger stages first."""
    base, rest = divmod(num_layers, num_stages)
    ranges, first = [], 1
    for stage in range(num_stages):
        last = first + base + (stage < rest) - 1
        ranges.append((first, last))
        first = last + 1
    return ranges
