"""From the trace of a step on each rank of a group to the causes of its waits."""

from collections.abc import Sequence

import torch

from megatron_lancet.lab.causes.attribution import StepCauses, causes_of
from megatron_lancet.lab.causes.traced import TracedRank
from megatron_lancet.lab.causes.wire import LinkKind
from megatron_lancet.lab.views.clocks import clock_corrections_ms
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.trace import StepTrace


def traced_rank(found: StepTrace, device: torch.device) -> TracedRank:
    """The data that a rank sends to the rank that finds causes; on the sender's clock."""
    return TracedRank(
        timeline=found.timeline,
        received_rows=found.received_rows,
        bytes_to=found.bytes_to,
        blocked=tuple((part.start_ms, part.end_ms, part.ms) for part in found.blocked),
        follows_host=device.type == "cuda",
    )


def link_kind(comm: Comm, device: torch.device) -> LinkKind:
    """How a model's messages are sent."""
    if device.type == "cuda":
        return LinkKind(sends_share_link=False)
    return LinkKind(dispatches_apart=comm.transport.launches_in_callback and not comm.settings.keeps_one_order)


def causes_of_group(ranks: Sequence[TracedRank], kind: LinkKind, ranks_per_node: int | None = None) -> StepCauses:
    """Causes of the waits of a step, on one clock.

    Args:
        ranks: all ranks of an expert-parallel group in its order, each on its own clock.
        ranks_per_node: neighbours in the group that are on a node; None if no plan of the run has two hops.

    Raises:
        CannotReplay: the traces don't belong to one step of one group.
    """
    group = [rank.rank for rank in ranks]
    if len(set(group)) < len(group):  # a mocked world: all are rank 0
        return causes_of(ranks, kind)
    corrections_ms = clock_corrections_ms([rank.timeline for rank in ranks], [group], ranks_per_node)
    return causes_of([rank.on_clock(corrections_ms[rank.rank]) for rank in ranks], kind)
