"""How much of the data sheets of GPUs and links real kernels and messages reach, as ranges. No torch.

The parts that are reached are common knowledge of such devices, not fitted to any run. ``--published`` shows how far
that carries.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from types import MappingProxyType

from megatron_lancet.lab.what_if.cluster import Cluster, Level
from megatron_lancet.planning.sizes.gpus import Gpu
from megatron_lancet.testkit.virtual_gpu.playback.device_model import DeviceModel


class Rate(StrEnum):
    """What bounds a kernel besides memory traffic."""

    PRODUCT = "matrix products"
    GROUPED = "experts' products"
    ATTENTION = "attention's products"
    NONE = "memory traffic"


@dataclass(frozen=True)
class Span:
    """The slow and the fast end of a range."""

    slow: float
    fast: float

    @property
    def middle(self) -> float:
        """The mean of both ends."""
        return (self.slow + self.fast) / 2

    @property
    def percent(self) -> str:
        """The range of a part, in percent."""
        return f"{100 * self.slow:.0f} to {100 * self.fast:.0f} %"


REACHED: Mapping[Rate, Span] = MappingProxyType(
    {
        Rate.PRODUCT: Span(0.55, 0.75),
        Rate.GROUPED: Span(0.45, 0.65),
        Rate.ATTENTION: Span(0.35, 0.6),
        Rate.NONE: Span(0.6, 0.85),
    }
)
"""Parts of the data sheet that kernels reach."""
LINK_REACHED = Span(0.55, 0.8)
"""Part of a link's bandwidth that an all-to-all or a ring reaches."""
LAUNCH_US = Span(35.0, 5.0)
"""Host time of a kernel's launch, Python and autograd included, with Transformer Engine's layers. Not measured."""
LOCAL_LAUNCH_US = Span(80.0, 8.0)
"""The same with Megatron's local layers. On the one host that was measured it is near the slow end (docs/gpus.md)."""
NO_LAUNCH_US = Span(0.0, 0.0)
"""CUDA graphs launch the kernels."""
PEER_US = {"intra": Span(2.0, 0.5), "inter": Span(4.0, 1.0)}
"""Latency of a message to one peer, inside a node and between nodes."""
MESSAGE_SMS = Span(24, 8)
"""Multiprocessors that a message takes from the kernels beside it."""


@dataclass(frozen=True)
class Speeds:
    """A device and its links at one end of each range.

    Attributes:
        device: memory traffic, smallest kernel, launches, multiprocessors; ``flops_per_s`` is for large products.
        flops_per_s: rate of kernels of each kind.
        cluster: links between the ranks, with the bandwidth that messages reach.
    """

    device: DeviceModel
    flops_per_s: Mapping[Rate, float]
    cluster: Cluster

    def kernel_us(self, rate: Rate, flops: float, num_bytes: float) -> float:
        """Duration of a kernel."""
        bound_us = flops / self.flops_per_s[rate] * 1e6 if flops else 0.0
        return max(bound_us, self.device.kernel_us(0, num_bytes))


def corners(
    gpu: Gpu, ranks_per_node: int, intra_gbps: float, inter_gbps: float, launch_us: Span = LAUNCH_US
) -> Iterator[Speeds]:
    """Yields the ends of all ranges combined: a slow and a fast host, each with a slow and a fast GPU, and with links.

    Args:
        launch_us: host time of a launch; equal ends give one host.
    """
    hosts_us = dict.fromkeys((launch_us.slow, launch_us.fast))
    for one_us, is_fast_gpu, is_fast_link in product(hosts_us, (False, True), (False, True)):
        reached = {rate: _end(span, is_fast_gpu) for rate, span in REACHED.items()}
        device = DeviceModel(
            flops_per_s=gpu.flops_per_s * reached[Rate.PRODUCT],
            bytes_per_s=gpu.bytes_per_s * reached[Rate.NONE],
            num_sms=gpu.num_sms,
            message_sms=round(_end(MESSAGE_SMS, is_fast_link)),
        ).with_launch_us(one_us)
        part = _end(LINK_REACHED, is_fast_link)
        levels = {
            name: Level(gbps * part, _end(PEER_US[name], is_fast_link))
            for name, gbps in (("intra", intra_gbps), ("inter", inter_gbps))
        }
        rates = {rate: gpu.flops_per_s * part for rate, part in reached.items()}
        yield Speeds(device, rates, Cluster(ranks_per_node, **levels))


def _end(span: Span, is_fast: bool) -> float:
    return span.fast if is_fast else span.slow
