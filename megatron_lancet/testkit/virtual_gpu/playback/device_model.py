"""A model of a GPU, its host and its links: what a kernel, a launch, a wait and a message cost."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_lancet.testkit.mock.link import Link

NVLINK = Link(10.0, 350.0)
"""A rank's share of NVLink 4: 450 GB/s each way by NVIDIA's data sheet of the H100 SXM, of which about 350 arrive."""

_NUM_COUNTS_KERNELS = 3
"""Kernels beside an exchange of token counts: their sum, and the copies to the host."""
_EVENTS_PER_LAUNCH = 0.25
"""Host time of recording an event, or of making a stream wait for it, over the time of a launch."""


@dataclass(frozen=True)
class DeviceModel:
    """Costs of everything that a log holds. The defaults are estimates for an H100 SXM; none of them was measured here.

    Attributes:
        flops_per_s: rate of matrix products: 60 % of the 989e12 for bf16 in NVIDIA's data sheet.
        bytes_per_s: memory traffic: 75 % of the 3.35e12 there.
        min_kernel_us: duration of the smallest kernel, with the gap in front of it.
        launch_us: host time of a kernel: Python, autograd and the driver.
        event_us: host time of recording an event, or of making a stream wait for it.
        collective_us: host time of launching a collective among several ranks.
        host_wait_us: time after an event until the host that waited for it goes on.
        connections: hardware queues, which streams share in turn; None for one queue each. Work of one queue starts in
            the order of its launches, and an event that is waited for stops all behind it.
        link: connection of every group that ``links`` does not name.
        links: connections by the name of the process group.
        one_link: whether messages of all groups queue for one link, in the order in which they could start; else those
            of one group do.
        num_sms: multiprocessors: 132 by NVIDIA's data sheet of the H100 SXM.
        message_sms: multiprocessors that a message takes. While one is on the wire, kernels of other streams have the
            rest, and run slower by that share. 0 for messages that take nothing from kernels.
        persistent: whether a matrix product holds its multiprocessors until it ends. A product that starts beside a
            message then runs in waves, and a message that starts beside a product waits for the product's end.
        carveout_sms: multiprocessors that matrix products leave free.
    """

    flops_per_s: float = 600e12
    bytes_per_s: float = 2.5e12
    min_kernel_us: float = 2.0
    launch_us: float = 4.0
    event_us: float = 1.0
    collective_us: float = 80.0
    host_wait_us: float = 12.0
    connections: int | None = None
    link: Link = NVLINK
    links: Mapping[str, Link] = field(default_factory=dict)
    one_link: bool = False
    num_sms: int = 132
    message_sms: int = 0
    persistent: bool = False
    carveout_sms: int = 0

    def with_launch_us(self, launch_us: float) -> "DeviceModel":
        """The same device with another launch cost; 0 makes everything free that the host does."""
        if launch_us == 0:
            return replace(self, launch_us=0.0, event_us=0.0, collective_us=0.0, host_wait_us=0.0)
        return replace(self, launch_us=launch_us, event_us=launch_us * _EVENTS_PER_LAUNCH)

    def kernel_us(self, flops: float, num_bytes: float) -> float:
        """Duration of a kernel: bounded by arithmetic, by memory, or by being a kernel."""
        flops_per_s = self.flops_per_s * (self.num_sms - self.carveout_sms) / self.num_sms
        return max(flops / flops_per_s * 1e6, num_bytes / self.bytes_per_s * 1e6, self.min_kernel_us)

    @property
    def counts_us(self) -> float:
        """Time of an exchange of token counts beside its message, until the host has them."""
        return _NUM_COUNTS_KERNELS * self.min_kernel_us + self.host_wait_us

    @property
    def speed_beside_message(self) -> float:
        """Speed of a kernel while a message is on the wire, by that without one."""
        return (self.num_sms - self.message_sms) / self.num_sms

    @property
    def waves_beside_message(self) -> int:
        """Number of waves of a persistent product that starts while a message is on the wire."""
        return math.ceil((self.num_sms - self.carveout_sms) / (self.num_sms - self.message_sms))

    @property
    def messages_wait(self) -> bool:
        """Whether a running product leaves too few multiprocessors free for a message."""
        return self.persistent and self.carveout_sms < self.message_sms

    @property
    def messages_meet(self) -> bool:
        """Whether a message has an effect on kernels of other streams, or on messages of other groups."""
        return self.one_link or self.message_sms > 0

    def message_us(self, group: str, num_bytes: float) -> float:
        """Time for which a message occupies its group's link."""
        return self.links.get(group, self.link).time_us(num_bytes)
