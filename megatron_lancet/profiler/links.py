"""Measures message times between the real ranks through the run's own transport, and fits a short curve."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megatron_lancet.planning.link_times import LinkTimes, Points
from megatron_lancet.planning.measured.fit import fit
from megatron_lancet.profiler.slowdown import ChunkSizes, measure_slowdowns, timed_ms
from megatron_lancet.runtime.collectives import from_all_ranks
from megatron_lancet.runtime.recorder import Point
from megatron_lancet.runtime.transport.base import ReadyEvent, Transfer, Transport

SMALLEST_BYTES = 1024
_GROWTH = 4
_ROW_BYTES = 16
_SKEW = 2
"""The first rank of an uneven exchange receives this many times the rows of another rank."""
_BUDGET_S = 2.0
_HOP_BUDGET_S = 1.0
_REDUCE_BUDGET_S = 0.6
_REDUCED_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_MAX_REPEATS = 7
_MIN_MESSAGES = 5
"""Minimum per size, however long they take: all predictions of exposed time depend on them."""
_LONGEST_REST_MS = 20.0


@dataclass(frozen=True)
class Link:
    """Connections to measure.

    Attributes:
        transport: the run's transport, between the ranks of a group.
        group: identifier of that group.
        rank: this rank's place in it.
        size: ranks in it.
        largest_bytes: largest message of the run on any rank; the sweep goes at least as far.
        share_what_leaves: whether several ranks share the outgoing link of their node.
    """

    transport: Transport
    group: int
    rank: int
    size: int
    largest_bytes: int
    share_what_leaves: bool = False


@dataclass(frozen=True)
class Wires:
    """Links to measure.

    Attributes:
        whole: between the ranks of an expert-parallel group.
        between_nodes: first of two hops; None in a run without two hops, as for the following.
        inside_node: second of two hops.
        reduce_group: ranks that sum gradients with each other.
        counts: token counts as the run sends them, [E] or more.
        device: device of the rows.
        sizes: sizes of a chunk's ops, for their slowdown while a message is in flight.
        loops_back: every rank receives what it sent (a mocked world), so both directions must be equal.
    """

    whole: Link
    between_nodes: Link | None
    inside_node: Link | None
    reduce_group: dist.ProcessGroup
    counts: torch.Tensor
    device: torch.device
    sizes: ChunkSizes
    loops_back: bool


def measure_links(wires: Wires) -> LinkTimes:
    """Sweeps the links, which takes about five seconds, with two hops eight. Collective over all ranks of the world."""
    all_reduce = _sweep_all_reduce(wires)
    if wires.whole.transport.is_local:
        return LinkTimes((), 0.0, all_reduce)
    alone, queued = _sweep(wires.whole, wires, _BUDGET_S)
    largest = _even(_sizes(wires.whole.largest_bytes)[-1], wires.whole.size)
    start = partial(_start, wires.whole, wires.device, largest)
    message_ms = _median_ms(partial(_all_to_all_ms, start), 0.1)
    slowdowns = measure_slowdowns(wires.sizes, start, message_ms, wires.device)
    between_nodes, between_nodes_queued = _sweep(wires.between_nodes, wires, _HOP_BUDGET_S)
    inside_node, inside_node_queued = _sweep(wires.inside_node, wires, _HOP_BUDGET_S)
    return LinkTimes(
        all_to_all=alone,
        counts_ms=_median_ms(partial(_counts_ms, wires), 0.2),
        all_reduce=all_reduce,
        # With one stream for all collectives no rank's message starts before the last rank has launched its own.
        sends_share_link=wires.device.type != "cuda",
        compute_slowdown=slowdowns[0],
        memory_slowdown=slowdowns[1],
        queued=queued,
        host_polls=wires.device.type != "cuda",
        between_nodes=between_nodes,
        between_nodes_queued=between_nodes_queued,
        inside_node=inside_node,
        inside_node_queued=inside_node_queued,
        launch_ms=_median_ms(partial(_launch_ms, wires), 0.1) if wires.device.type == "cuda" else 0.0,
    )


def _sweep(link: Link | None, wires: Wires, budget_s: float) -> tuple[Points, Points]:
    """Returns the curves of messages alone, and of messages that are queued behind another. Collective over the world.

    All ranks of the world send at once, each in its own group. So a node's ranks share its outgoing link in the first
    of two hops, as they do in a step. A group of one rank sends nothing, and its curves are empty.

    Args:
        link: None for connections that the run does not have.
    """
    if link is None or link.transport.is_local:
        return (), ()
    places = from_all_ranks((link.group, link.rank))
    sizes = _sizes(link.largest_bytes)
    share_s = budget_s / (2 * len(sizes))
    alone, queued = [], []
    for size in sizes:
        exchanges = [_even(size, link.size)]
        if not link.share_what_leaves:  # else the neighbour of the rank with most rows leaves the shared link to it
            exchanges.append(_uneven(size, link.size, wires.loops_back))
        for rows in exchanges:
            start = partial(_start, link, wires.device, rows)
            about_ms = _median_ms(partial(_all_to_all_ms, start), 0.0)
            two_ms = partial(_two_all_to_alls_ms, start, wires.device, about_ms)
            found = _on_all_ranks(two_ms, share_s, _MIN_MESSAGES)
            first_ms, next_ms = _busiest_ms(rows, places, found, link.share_what_leaves)
            alone.append((_busiest_bytes(rows), first_ms))
            queued.append((_busiest_bytes(rows), next_ms))
    return fit(alone), fit(queued)


def _sizes(largest_bytes: int) -> list[int]:
    """Returns sizes from 1 KB to at least ``largest_bytes``, ascending and well apart."""
    sizes = [SMALLEST_BYTES]
    while 2 * sizes[-1] * _GROWTH < largest_bytes:
        sizes.append(sizes[-1] * _GROWTH)
    return [*sizes, max(largest_bytes, SMALLEST_BYTES * _GROWTH)]


Rows = list[list[int]]
"""Rows from rank i to rank j, 0 for i = j."""


def _even(num_bytes: int, num_ranks: int) -> Rows:
    """Returns an exchange in which every rank sends ``num_bytes``, evenly."""
    each = max(1, round(num_bytes / (num_ranks - 1) / _ROW_BYTES))
    return [[each if i != j else 0 for j in range(num_ranks)] for i in range(num_ranks)]


def _uneven(num_bytes: int, num_ranks: int, both_ways: bool) -> Rows:
    """Returns an exchange in which the first rank receives more than the others; ``both_ways``: it also sends more."""
    weights = [_SKEW] + [1] * (num_ranks - 1)
    each = max(1, round(num_bytes / (num_ranks - 1) / _SKEW / _ROW_BYTES))
    return [
        [each * weights[j] * (weights[i] if both_ways else 1) if i != j else 0 for j in range(num_ranks)]
        for i in range(num_ranks)
    ]


def _busiest_bytes(rows: Rows) -> int:
    """Returns the largest number of bytes that any rank sends or receives."""
    sent = max(sum(row) for row in rows)
    received = max(sum(column) for column in zip(*rows, strict=True))
    return max(sent, received) * _ROW_BYTES


def _start(link: Link, device: torch.device, rows: Rows) -> Transfer:
    send, receive = rows[link.rank], [row[link.rank] for row in rows]
    sent = torch.zeros(sum(send), _ROW_BYTES, dtype=torch.uint8, device=device)
    return link.transport.launch(sent.new_empty(sum(receive), _ROW_BYTES), sent, receive, send)


def _launch_ms(wires: Wires) -> float:
    """Returns the time in which the host launches a message."""
    link = wires.whole
    rows = _even(SMALLEST_BYTES, link.size)
    send, receive = rows[link.rank], [row[link.rank] for row in rows]
    sent = torch.zeros(sum(send), _ROW_BYTES, dtype=torch.uint8, device=wires.device)
    received = sent.new_empty(sum(receive), _ROW_BYTES)
    start_s = time.perf_counter()
    transfer = link.transport.launch(received, sent, receive, send)
    launched_s = time.perf_counter()
    transfer.wait()
    return (launched_s - start_s) * 1e3


def _all_to_all_ms(start: Callable[[], Transfer]) -> float:
    transfer = start()
    transfer.wait()
    return _between_ms(*transfer.interval())


def _two_all_to_alls_ms(start: Callable[[], Transfer], device: torch.device, about_ms: float) -> list[float]:
    """Returns the time of a message on an idle link, and the delay after it of another that is launched meanwhile.

    Args:
        start: launches a message.
        about_ms: estimated time of one message.
    """
    time.sleep(min(about_ms, _LONGEST_REST_MS) / 1e3)
    first = start()
    if device.type != "cuda":  # on CUDA the stream keeps them apart
        time.sleep(about_ms / 2 / 1e3)
    second = start()
    first.wait()
    second.wait()
    begin, end = first.interval()
    return [_between_ms(begin, end), max(0.0, _between_ms(end, second.interval()[1]))]


def _between_ms(start: Point, end: Point) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return (end - start) * 1e3
    assert not isinstance(end, float)
    end.synchronize()
    return start.elapsed_time(end)


def _counts_ms(wires: Wires) -> float:
    start_s = time.perf_counter()
    wires.whole.transport.exchange_counts(lambda: wires.counts, ReadyEvent(wires.counts)).wait()
    return (time.perf_counter() - start_s) * 1e3


def _sweep_all_reduce(wires: Wires) -> Points:
    """Measures in every rank's own group; the groups of a world are alike."""
    if wires.reduce_group.size() == 1:
        return ()

    def reduce_ms(values: torch.Tensor) -> float:
        return timed_ms(lambda: dist.all_reduce(values, group=wires.reduce_group), wires.device)

    points = []
    for size in _REDUCED_BYTES:
        values = torch.zeros(size // 4, device=wires.device)
        share_s = _REDUCE_BUDGET_S / len(_REDUCED_BYTES)
        points.append((size, _median_ms(partial(reduce_ms, values), share_s)))
    return fit(points)


def _median_ms(measure: Callable[[], float], budget_s: float) -> float:
    """Returns the slowest rank's median of as many measurements as fit into the budget. Collective over the world."""
    return max(
        statistics.median(ms for (ms,) in samples) for samples in _on_all_ranks(lambda: [measure()], budget_s, 1)
    )


def _busiest_ms(
    rows: Rows,
    places: Sequence[tuple[int, int]],
    ranks: Sequence[Sequence[Sequence[float]]],
    share_what_leaves: bool = False,
) -> tuple[float, float]:
    """Returns the time of a message, and of another queued behind it: medians over repeats, of the slowest group.

    The rank that receives most waits longest for bytes; of several such ranks the one that launched last waited for no
    other. The next message follows on all of them at once, so there their mean counts. Where ranks share a link, the
    rows of one may all be sent before its neighbour's rows, so the rank of all groups that gets its rows last counts.

    Args:
        places: group of each rank of the world, and the rank's place in it.
        ranks: both times, by rank of the world and repeat.
        share_what_leaves: see :class:`Link`.
    """
    of_ranks = max if share_what_leaves else min
    received = [sum(column) for column in zip(*rows, strict=True)]
    slowest = (0.0, 0.0)
    for group in {0} if share_what_leaves else sorted({group for group, _ in places}):
        own = [
            (received[place], one)
            for (of, place), one in zip(places, ranks, strict=True)
            if of == group or share_what_leaves
        ]
        most = max(number for number, _ in own)  # a mocked world has only one rank of the group
        by_repeat = list(zip(*(one for number, one in own if number == most), strict=True))
        first_ms = statistics.median(of_ranks(first for first, _ in repeat) for repeat in by_repeat)
        next_ms = statistics.median(statistics.fmean(following for _, following in repeat) for repeat in by_repeat)
        slowest = max(slowest, (first_ms, next_ms))
    return slowest


def _on_all_ranks(measure: Callable[[], list[float]], budget_s: float, at_least: int) -> list[list[list[float]]]:
    """Returns measurements by rank, as many as fit into the budget. Collective over the world.

    Args:
        measure: returns times whose sum is about the duration of the measurement.
        at_least: minimum number, whatever they take.
    """
    dist.barrier()
    measure()  # connects, allocates
    dist.barrier()
    samples = [measure()]
    first_ms = max(from_all_ranks(sum(samples[0])))
    for _ in range(max(at_least - 1, min(_MAX_REPEATS, int(budget_s * 1e3 / max(first_ms, 0.1))))):
        dist.barrier()
        samples.append(measure())
    return from_all_ranks(samples)
