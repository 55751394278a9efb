"""The fields by which tools for GPU traces (HTA, TraceLens, Perfetto's queries) recognise kernels and collectives.

They are those that Kineto writes: category ``kernel``, the stream, and of a collective its name, sizes and ranks.
Compute is on one stream, each row of messages on a stream of its own, so that no stream has two kernels at a time.
What a rank receives is not recorded: as the size of what comes in stands what it sends to others, in bytes. Tools match
the n-th collective of a process group on one rank with the n-th on the others, so each connection has a name of its
own: each follows the order of the plan, but they are not ordered against each other.
"""

import json
from collections.abc import Sequence
from typing import Any

from megatron_lancet.schedule.ops import BETWEEN_NODES, INSIDE_NODE, PAYLOADS, Op, OpKind
from megatron_lancet.schedule.timeline import Lane, Span

KERNEL = "kernel"
COMPUTE_STREAM = 7
"""Torch's default stream has this number in Kineto's traces."""
FIRST_COMM_STREAM = 20
OF_ROWS, _OF_COUNTS, _REDUCTION = "all_to_allv", "all_to_all", "allreduce"
_GROUP = "EXPERT_MODEL_PARALLEL_GROUP"
_COUNTS_GROUP = "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"
_DENSE_GROUP = "DATA_PARALLEL_GROUP"


def category(span: Span) -> str:
    """Category of a span's event: a wait is no kernel."""
    return span.lane.value if span.lane is Lane.WAIT else KERNEL


def kernel_args(span: Span, row: int, rank: int, groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The arguments of a span's kernel; none of a wait.

    Args:
        row: of a message, from 0.
        rank: whose span it is.
        groups: expert-parallel groups; empty if unknown.
    """
    if span.lane is Lane.WAIT:
        return {}
    if span.lane is Lane.COMPUTE:
        return {"device": 0, "stream": COMPUTE_STREAM}
    found = {"device": 0, "stream": FIRST_COMM_STREAM + row, "Collective name": collective_name(span.name)}
    found |= {"dtype": "Byte", "In msg nelems": span.num_bytes, "Out msg nelems": span.num_bytes}
    if found["Collective name"] == _REDUCTION:
        return {**found, "Process Group Name": _DENSE_GROUP}
    group = next((tuple(ranks) for ranks in groups if rank in ranks), None)
    name = _connection(span.name)
    if group is None:
        return {**found, "Process Group Name": name}
    return found | {
        "Process Group Name": f"{name} {group[0]}",
        "Group size": len(group),
        "Process Group Ranks": json.dumps(list(group)),
    }


def collective_name(name: str) -> str:
    """Name of the collective of a message in torch."""
    op = Op.find(name)
    if op is None:
        return _REDUCTION
    if op.kind == OpKind.COUNTS:
        return _OF_COUNTS
    return OF_ROWS if op.kind in PAYLOADS else _REDUCTION


def _connection(name: str) -> str:
    """Name of the connection of an all-to-all's ranks that its message takes."""
    op = Op.find(name)
    if op is None or op.kind not in (OpKind.COUNTS, *BETWEEN_NODES, *INSIDE_NODE):
        return _GROUP
    if op.kind == OpKind.COUNTS:
        return _COUNTS_GROUP
    return f"{_GROUP} between nodes" if op.kind in BETWEEN_NODES else f"{_GROUP} inside nodes"
