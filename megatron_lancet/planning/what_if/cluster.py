"""What messages take in a cluster of nodes, by the alpha-beta model: a latency per message and a bandwidth.

Legend: n ranks of a group, r of them on each node, b bytes, alpha latency, beta bytes per ms. A rank's ports are full
duplex, and each level has its own: what goes to other nodes does not slow what stays inside.

Formulas: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), for
the pairwise exchange, (n - 1) alpha + b / beta; Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for
Clusters of Workstations" (2009), for the ring, 2 (n - 1) (alpha + b / (n beta)).
"""

from dataclasses import dataclass

from megatron_lancet.planning.profile import LinkTimes

_US_PER_MS = 1e3
_BYTES_PER_MS_OF_1_GBPS = 1e9 / 8 / 1e3


@dataclass(frozen=True)
class Level:
    """One kind of link.

    Attributes:
        gbps: Gb/s (10^9 bits) of one rank, in each direction. A port that several ranks share counts in equal parts.
        latency_us: of one message.
    """

    gbps: float
    latency_us: float

    @property
    def bytes_per_ms(self) -> float:
        """The bandwidth."""
        return self.gbps * _BYTES_PER_MS_OF_1_GBPS

    @property
    def latency_ms(self) -> float:
        """The latency."""
        return self.latency_us / _US_PER_MS


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal size; ranks are numbered node by node, so neighbours share one.

    Attributes:
        intra: between ranks of a node.
        inter: between nodes.
    """

    ranks_per_node: int
    intra: Level
    inter: Level

    def all_to_all_ms(self, num_bytes: float, size: int) -> float:
        """An all-to-all of ``size`` neighbouring ranks, until the slower of its two levels is done.

        Args:
            num_bytes: what a rank sends to the others of the group, in equal parts.
        """
        if size <= 1:
            return 0.0
        inside = min(size, self.ranks_per_node) - 1
        outside = size - 1 - inside
        parts = ((self.intra, inside), (self.inter, outside))
        return max(
            peers * level.latency_ms + num_bytes * peers / (size - 1) / level.bytes_per_ms
            for level, peers in parts
            if peers
        )

    def all_reduce_ms(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """A ring all-reduce of ``size`` ranks of which each is ``stride`` ranks after the one before.

        The ring's slowest link sets its pace: the inner level only where all of them are on one node.

        Args:
            num_bytes: of the reduced tensor.
        """
        if size <= 1:
            return 0.0
        level = self.intra if size * stride <= self.ranks_per_node else self._slower(num_bytes / size)
        return 2 * (size - 1) * (level.latency_ms + num_bytes / size / level.bytes_per_ms)

    def message_ms(self, num_bytes: float, distance: int) -> float:
        """One message to the rank that is ``distance`` ranks further, from the first rank of a node."""
        level = self.intra if distance < self.ranks_per_node else self.inter
        return level.latency_ms + num_bytes / level.bytes_per_ms

    def _slower(self, num_bytes: float) -> Level:
        return max(self.intra, self.inter, key=lambda level: level.latency_ms + num_bytes / level.bytes_per_ms)


def fitted_level(link: LinkTimes, size: int) -> Level | None:
    """The level that a measured all-to-all of ``size`` ranks comes closest to; None if there are too few points.

    The bandwidth is that of the step between the largest two messages, the latency what is left of the smallest one.
    """
    points = link.all_to_all
    if size <= 1 or len(points) < 2:
        return None
    (bytes_before, ms_before), (bytes_last, ms_last) = points[-2:]
    slope_ms = (ms_last - ms_before) / (bytes_last - bytes_before) if bytes_last > bytes_before else 0.0
    if slope_ms <= 0:  # noise: take the largest message as a whole
        slope_ms = ms_last / bytes_last if bytes_last else 0.0
    if slope_ms <= 0:
        return None
    least_bytes, least_ms = points[0]
    latency_ms = max(0.0, least_ms - least_bytes * slope_ms) / (size - 1)
    return Level(1 / slope_ms / _BYTES_PER_MS_OF_1_GBPS, latency_ms * _US_PER_MS)
