"""Times of messages in a cluster of nodes by the alpha-beta model: a latency per message and a bandwidth.

Legend: n ranks of a group, r of them on each node, b bytes, alpha latency, beta bytes per ms. A rank's ports are full
duplex, and each level has its own: messages to other nodes do not slow messages inside a node.

Formulas: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), for
the pairwise exchange, (n - 1) alpha + b / beta; Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for
Clusters of Workstations" (2009), for the ring, 2 (n - 1) (alpha + b / (n beta)).
"""

from dataclasses import dataclass

from megatron_lancet.planning.link_times import LinkTimes

_US_PER_MS = 1e3
_BYTES_PER_MS_OF_1_GBPS = 1e9 / 8 / 1e3


@dataclass(frozen=True)
class Level:
    """One kind of link.

    Attributes:
        gbps: Gb/s (10^9 bits) of one rank in each direction; an equal part of a port that several ranks share.
        latency_us: latency of one message.
    """

    gbps: float
    latency_us: float

    @property
    def bytes_per_ms(self) -> float:
        """Bandwidth in bytes per ms."""
        return self.gbps * _BYTES_PER_MS_OF_1_GBPS

    @property
    def latency_ms(self) -> float:
        """Latency in ms."""
        return self.latency_us / _US_PER_MS


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal size; ranks are numbered node by node, so neighbouring ranks share one.

    Attributes:
        intra: links between ranks of a node.
        inter: links between nodes.
    """

    ranks_per_node: int
    intra: Level
    inter: Level

    def all_to_all_ms(self, num_bytes: float, size: int) -> float:
        """Time of an all-to-all of ``size`` neighbouring ranks: the time of the slower of the two levels.

        Args:
            num_bytes: bytes that a rank sends to the others of the group, in equal parts.
        """
        inside = min(size, self.ranks_per_node) - 1
        part = num_bytes / max(1, size - 1)
        return max(
            _exchange_ms(self.intra, inside, part * inside),
            _exchange_ms(self.inter, size - 1 - inside, part * (size - 1 - inside)),
        )

    def between_nodes_ms(self, num_bytes: float, num_nodes: int) -> float:
        """Time of an all-to-all of the ranks that have the same place on ``num_nodes`` nodes: the first of two hops.

        Args:
            num_bytes: bytes that a rank sends to other nodes, in equal parts.
        """
        return _exchange_ms(self.inter, num_nodes - 1, num_bytes)

    def inside_node_ms(self, num_bytes: float, size: int) -> float:
        """Time of an all-to-all of ``size`` ranks of a node: the second of two hops.

        Args:
            num_bytes: bytes that a rank sends to the others, in equal parts.
        """
        return _exchange_ms(self.intra, size - 1, num_bytes)

    def all_reduce_ms(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Time of a ring all-reduce of every ``stride``-th rank, ``size`` ranks in all.

        The ring is as fast as its slowest link, which is inside a node only if all ranks are on one node.

        Args:
            num_bytes: size of the reduced tensor.
        """
        if size <= 1:
            return 0.0
        levels = [self.intra] if size * stride <= self.ranks_per_node else [self.intra, self.inter]
        return 2 * (size - 1) * max(level.latency_ms + num_bytes / size / level.bytes_per_ms for level in levels)

    def message_ms(self, num_bytes: float, distance: int) -> float:
        """Time of one message from the first rank of a node to the rank ``distance`` ranks after it."""
        level = self.intra if distance < self.ranks_per_node else self.inter
        return level.latency_ms + num_bytes / level.bytes_per_ms


def _exchange_ms(level: Level, num_peers: int, num_bytes: float) -> float:
    """Time of a pairwise exchange with ``num_peers`` peers, to which ``num_bytes`` are sent in all."""
    return num_peers * level.latency_ms + num_bytes / level.bytes_per_ms if num_peers > 0 else 0.0


def fitted_level(link: LinkTimes, size: int) -> Level | None:
    """Fits a level to measured all-to-alls of ``size`` ranks; None if there are too few points.

    The bandwidth comes from the difference of the two largest messages, the latency from the rest of the smallest one.
    """
    points = link.all_to_all
    if size <= 1 or len(points) < 2:
        return None
    (bytes_before, ms_before), (bytes_last, ms_last) = points[-2:]
    slope_ms = (ms_last - ms_before) / (bytes_last - bytes_before) if bytes_last > bytes_before else 0.0
    if slope_ms <= 0:  # noise: use the whole time of the largest message
        slope_ms = ms_last / bytes_last if bytes_last else 0.0
    if slope_ms <= 0:
        return None
    least_bytes, least_ms = points[0]
    latency_ms = max(0.0, least_ms - least_bytes * slope_ms) / (size - 1)
    return Level(1 / slope_ms / _BYTES_PER_MS_OF_1_GBPS, latency_ms * _US_PER_MS)
