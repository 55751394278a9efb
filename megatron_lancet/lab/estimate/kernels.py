"""Kernels of a layer's parts: FLOP, bytes and launches, and how long they take on a device.

Legend: T tokens of a chunk on a rank, s ranks that share the residual stream (tensor parallel size under sequence
parallelism, else 1), v bytes of a value.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_lancet.lab.estimate.devices import Rate, Speeds

_WGRAD_BYTES = 8
"""Read and write traffic of an element of a gradient in fp32 to which a dW is added."""
_US_PER_MS = 1e3


@dataclass(frozen=True)
class Kernel:
    """One large kernel with the small ones around it.

    Attributes:
        launches: number of kernels that the host launches for it.
        link_bytes: bytes that the rank sends to others of a group of neighbouring ranks, which the next kernel awaits.
        group_size: number of ranks of that group.
    """

    rate: Rate = Rate.NONE
    flops: float = 0.0
    num_bytes: float = 0.0
    launches: float = 1.0
    link_bytes: float = 0.0
    group_size: int = 1


@dataclass(frozen=True)
class Weight:
    """The gradient of a weight of a part.

    Attributes:
        pinned_bytes: inputs and gradients of outputs that it keeps alive while it is deferred.
        numel: elements on the rank.
    """

    name: str
    kernel: Kernel
    pinned_bytes: float
    numel: float


@dataclass(frozen=True)
class Part:
    """A part of an op that is recomputed as a whole, or not at all.

    Attributes:
        modules: names in ``--recompute-modules`` with which its forward runs again in the backward.
        backward: kernels of the gradient of its input.
    """

    modules: frozenset[str]
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    weights: tuple[Weight, ...] = ()


def elementwise(
    forward_bytes: float, backward_bytes: float, launches: tuple[float, float] = (1.0, 1.0), *modules: str
) -> Part:
    """A part that only moves data.

    Args:
        launches: kernels forward and backward.
    """
    forward, backward = launches
    return Part(
        frozenset(modules),
        (Kernel(num_bytes=forward_bytes, launches=forward),),
        (Kernel(num_bytes=backward_bytes, launches=backward),),
    )


def product(
    name: str,
    rows: float,
    inner: float,
    outer: float,
    value_bytes: int,
    *modules: str,
    num_experts: int = 0,
    launches: float = 1.0,
) -> Part:
    """A linear layer: [rows, inner] by [inner, outer].

    Args:
        num_experts: experts of the rank among which the rows are shared out, each with a weight of its own; 0 for a
            layer that is none.
        launches: kernels of one of its three products.
    """
    # Rows of an expert fill tiles of 128; on average half a tile is empty.
    worked = rows + 64 * num_experts
    flops = 2 * worked * inner * outer
    numel = inner * outer * max(1, num_experts)
    rate = Rate.GROUPED if num_experts else Rate.PRODUCT
    ends = rows * (inner + outer) * value_bytes
    through = (Kernel(rate, flops, ends + numel * value_bytes, launches),)
    weight = Weight(name, Kernel(rate, flops, ends + numel * _WGRAD_BYTES, launches), ends, numel)
    return Part(frozenset(modules), through, through, (weight,))


def exchange(whole_bytes: float, group_size: int, *modules: str) -> Part:
    """A gather or a reduction that the next kernel waits for, and its mirror image.

    Args:
        whole_bytes: bytes of the gathered tensor.
    """
    sent = whole_bytes * (group_size - 1) / group_size
    kernels = (Kernel(link_bytes=sent, group_size=group_size),) if sent else ()
    return Part(frozenset(modules), kernels, kernels)


def time_ms(kernels: Iterable[Kernel], speeds: Speeds) -> float:
    """Time of consecutive kernels: device time, or the host's launch time if that is longer."""
    device_us = host_us = 0.0
    least_us = speeds.device.min_kernel_us
    for one in kernels:
        own_us = max(speeds.kernel_us(one.rate, one.flops, one.num_bytes), least_us * one.launches)
        sent_us = 0.0
        if one.link_bytes:
            sent_us = speeds.cluster.message_ms(one.link_bytes, one.group_size - 1) * _US_PER_MS
        device_us += own_us + sent_us
        host_us += one.launches * speeds.device.launch_us
    return max(device_us, host_us) / _US_PER_MS


def forward_of(parts: Sequence[Part]) -> list[Kernel]:
    """Kernels of a forward pass."""
    return [kernel for part in parts for kernel in part.forward]


def backward_of(parts: Sequence[Part]) -> list[Kernel]:
    """Kernels of the gradient of the input, without recomputing."""
    return [kernel for part in reversed(parts) for kernel in part.backward]
