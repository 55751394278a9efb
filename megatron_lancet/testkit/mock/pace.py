"""When the bytes of a message leave a paced link, and the words in a device's memory with which its blocks agree."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

PIECE_BYTES = 64 * 1024
"""Bytes that a block copies at a time."""
MAX_WAIT_NS = 60 * 10**9
"""A message that is not over by then is an error and not a hang."""
MAX_SPINS = 1 << 26
"""How often a block looks whether the message has started, before it gives up."""
START, ARRIVED, FINISHED, LAST_START, LAST_END = range(5)
"""Places in the state of a link and a stream.

START: time at which the message's time on the link begins; 0 while no block of the message has got an SM.
ARRIVED, FINISHED: blocks of the kernel that have begun and that are done; 0 between two kernels.
LAST_START, LAST_END: times of the last message, to be read by the host.
"""
NUM_WORDS = 8


class Words(NamedTuple):
    """Words that the blocks of a message read and change; int64 each, times in nanoseconds of the device's clock.

    Attributes:
        free_at: [1], end of the last message that has started. One for each link: all streams share it.
        state: [NUM_WORDS], by the places above. One for each link and stream, since a stream has one kernel at a time.
        gave_up: [1], set to 1 by a block that has waited too long. In the host's memory, so that the host sees it
            without a wait.
    """

    free_at: torch.Tensor
    state: torch.Tensor
    gave_up: torch.Tensor


class Pace(NamedTuple):
    """When the pieces of one copy of a message are due, in nanoseconds after the message's start.

    Piece i of n is due at ``offset_ns + share_ns * (i + 1) / n``.

    Attributes:
        claimed_ns: time for which the whole message occupies the link.
        offset_ns: latency, and the shares of the message's copies before this one.
        share_ns: share of this copy.
        is_last: whether the message ends with this copy.
    """

    claimed_ns: int
    offset_ns: int
    share_ns: int
    is_last: bool


def paces_of(latency_us: float, duration_us: float, sizes: Sequence[int]) -> list[Pace]:
    """The paces of the copies of a message.

    Args:
        duration_us: of the message on the link, without the latency.
        sizes: bytes of each copy.
    """
    all_bytes = max(sum(sizes), 1)
    claimed_ns = round((latency_us + duration_us) * 1e3)
    ends_ns, num_bytes = [round(latency_us * 1e3)], 0
    for size in sizes[:-1]:
        num_bytes += size
        ends_ns.append(round((latency_us + duration_us * num_bytes / all_bytes) * 1e3))
    ends_ns.append(claimed_ns)
    return [
        Pace(claimed_ns, start_ns, end_ns - start_ns, is_last=i == len(sizes) - 1)
        for i, (start_ns, end_ns) in enumerate(itertools.pairwise(ends_ns))
    ]
