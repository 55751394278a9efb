"""Marks on a GPU's compute stream: a kernel belongs to what the host's op that launched it belongs to.

No trace of a GPU was ever recorded for this project: the fields are as Kineto documents them, and the tests' traces
are generated from these.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence

from megatron_lancet.lab.from_trace.events import Event, RankEvents
from megatron_lancet.lab.from_trace.lacks import TraceLacks
from megatron_lancet.lab.from_trace.leaves import CORE_NAMES
from megatron_lancet.lab.from_trace.marks import Mark
from megatron_lancet.schedule.timeline import Lane

_COLLECTIVE = re.compile(r"(?i)^nccl")
_PRODUCT = re.compile(r"(?i)gemm|nvjet|cutlass|xmma")
_LEAST_US = 5.0
"""A shorter kernel is mostly its launch, whatever its tensors' sizes."""


def is_collective(kernel: Event) -> bool:
    """Whether it is one of NCCL's."""
    return _COLLECTIVE.search(kernel.name) is not None


def device_marks(
    rank: RankEvents, begin_us: float, host: Sequence[Mark]
) -> tuple[float, list[Mark], list[tuple[str, Event]]]:
    """Marks of the kernels that were launched in a pass.

    Args:
        begin_us: start of the pass on the host.
        host: marks of the pass on the host.

    Returns:
        Start of the first kernel in us, marks of all, and the kernels of messages in order with the messages' names.

    Raises:
        TraceLacks: the weight gradients of linear layers ran elsewhere.
    """
    launched: list[tuple[Event, Mark]] = []
    for kernel in rank.kernels:
        time_us = rank.launches.get(kernel.args.get("correlation", -1))
        if time_us is None or not begin_us <= time_us < host[-1].end_us:
            continue
        launched.append((kernel, host[bisect_right(host, time_us, key=lambda mark: mark.end_us)]))
    if not launched:
        return begin_us, [], []
    in_weight_grads = _kernels_of_weight_grads(rank.path, launched)
    marks: list[Mark] = []
    messages: list[tuple[str, Event]] = []
    for kernel, mark in launched:
        if is_collective(kernel):
            if mark.lane is not Lane.WAIT:
                # A reduction of gradients, next to everything else; or a message of tensor or context parallelism, for
                # which the next kernel of the compute stream waits: that gap belongs to the op of this kernel.
                continue
            messages.append((mark.name, kernel))
        name = mark.weight_grad if id(kernel) in in_weight_grads else mark.name
        took_us = kernel.end_us - kernel.start_us
        scaled_us = took_us if took_us >= _LEAST_US else 0.0
        core_us = scaled_us if CORE_NAMES.search(kernel.name) else 0.0
        end_us = max(kernel.end_us, marks[-1].end_us if marks else 0.0)
        marks.append(Mark(end_us, name, mark.lane, scaled_us=scaled_us, core_us=core_us))
    return launched[0][0].start_us, marks, messages


def _kernels_of_weight_grads(path: str, launched: Sequence[tuple[Event, Mark]]) -> set[int]:
    """Of ops that compute dX and dW without ops of the host for each: the later half of the products and all behind."""
    by_mark: dict[int, list[Event]] = {}
    for kernel, mark in launched:
        if mark.weight_grad:
            by_mark.setdefault(id(mark), []).append(kernel)
    found = set()
    for kernels in by_mark.values():
        products = [kernel for kernel in kernels if _PRODUCT.search(kernel.name)]
        if len(products) < 2:
            raise TraceLacks(
                path,
                f"{len(products)} product of matrices in the backward pass of a linear layer, where dX and dW are two",
                "Record without --delay-wgrad-compute and --overlap-dispatch-backward-with-experts-wgrad",
            )
        first = products[len(products) // 2]
        found |= {id(kernel) for kernel in kernels if kernel.start_us >= first.start_us}
    return found
