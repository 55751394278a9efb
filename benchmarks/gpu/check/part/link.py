"""The modelled link against its formula: one message, two concurrent streams, and the copy rate by number of SMs."""

import itertools
import math
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.check.place import Place
from benchmarks.gpu.record import Recorder
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.paced_link import PacedLink
from megatron_lancet.testkit.mock.transfer import Transfer

LATENCY_US = 10.0
RATES = (350.0, 45.0)
"""GB/s: a rank's share of NVLink 4 among 8 ranks, and one adapter of 400 Gbit/s."""
NUM_SMS = (8, 16, 32)
_SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)
_TINY_SIZES = (1000, 70_000)
_NO_TIME = Link(gbytes_per_s=1e9)
"""A link that holds nothing back, but is not free: its messages are kernels of the link."""
_TOLERANCE, _TOLERANCE_US = 0.02, 2.0
"""Error that a message may have beyond the launch of a kernel."""
_RESERVE = 0.8
"""A link faster than this share of what its SMs copy is not expected to keep to its formula."""
_MIN_LEFT_S = 1.0


class Bench:
    """Times what is enqueued, on the current stream. The host is far ahead: a blocker holds up the device meanwhile."""

    def __init__(self, num_bytes: int, blocked_us: float = 1000) -> None:
        """
        Args:
            num_bytes: bytes of the largest message.
            blocked_us: time in which the host enqueues what is timed.
        """
        self._source = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
        self._target = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        self._blocker = PacedLink(Link(latency_us=blocked_us), num_sms=1)

    def transfer(self, num_bytes: int, offset: int = 0) -> Transfer:
        """A copy of ``num_bytes`` bytes, starting at byte ``offset``."""
        part = slice(offset, offset + num_bytes)
        return Transfer([(self._target[part], self._source[part])])

    def send(self, link: PacedLink, num_bytes: int, offset: int = 0) -> None:
        """Enqueues a message, all of whose bytes go to other ranks."""
        link.send(self.transfer(num_bytes, offset), num_bytes)

    def block(self) -> None:
        """Holds up the current stream."""
        self._blocker.send(self.transfer(0), 0)

    def elapsed_us(self, enqueue: Callable[[], None]) -> float:
        """Time between the events in front of and behind what ``enqueue`` enqueues."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.block()
        start.record()
        enqueue()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3


def run(record: Recorder, place: Place) -> None:
    """Runs this part of the check."""
    sizes, num_repeats = (_TINY_SIZES, 2) if place.is_rehearsal else (_SIZES, 5)
    with place.watch():
        bench = Bench(max(sizes))
        start_s = time.perf_counter()
        no_time = PacedLink(_NO_TIME)
        bench.send(no_time, sizes[0])
        torch.cuda.synchronize()
        record.add("first launch", host_s=round(time.perf_counter() - start_s, 2))
        launch_us = _median(lambda: bench.elapsed_us(lambda: bench.send(no_time, 0)), num_repeats)
        record.add("launch of an empty message", measured_us=launch_us)
        copied = _copy_rates(record, bench, max(sizes), num_repeats)
    stamps: list[int] = []
    for num_sms in NUM_SMS:
        for rate in RATES:
            link = PacedLink(Link(LATENCY_US, rate), num_sms)
            for size in sizes:
                if record.time_left_s() < _MIN_LEFT_S:
                    record.add("stopped", why="no time is left")
                    return
                with record.guarded(_name(size, link)), place.watch():
                    found = _one_message(bench, link, size, num_repeats, stamps)
                    found |= {"launch_us": launch_us, "copied_gbytes_per_s": copied[num_sms]}
                    _judge(record, _name(size, link), found, is_judged=not place.is_rehearsal)
    with record.guarded("two streams"), place.watch():
        link = PacedLink(Link(LATENCY_US, RATES[0]))
        found = _two_streams(bench, link, max(sizes) // 4, num_repeats)
        found |= {"launch_us": launch_us, "copied_gbytes_per_s": copied[link.num_sms]}
        name = f"two streams, {_name(max(sizes) // 4, link)} each"
        _judge(record, name, found, is_judged=not place.is_rehearsal)
    steps = [other - one for one, other in itertools.pairwise(stamps)]
    record.add("clock of the device", step_ns=math.gcd(*steps))


def _name(num_bytes: int, link: PacedLink) -> str:
    return f"{num_bytes / 1e6:g} MB at {link.link.gbytes_per_s:g} GB/s, {link.num_sms} SMs"


def _median(measure: Callable[[], float], num_repeats: int) -> float:
    measure()
    return statistics.median(measure() for _ in range(num_repeats))


def _copy_rates(record: Recorder, bench: Bench, num_bytes: int, num_repeats: int) -> dict[int, float]:
    """Copy rate of each number of SMs without pacing, in GB/s; a link can't be faster."""
    rates = {}
    for num_sms in NUM_SMS:
        link = PacedLink(_NO_TIME, num_sms)

        def measure(link: PacedLink = link) -> float:
            return bench.elapsed_us(lambda: bench.send(link, num_bytes))

        took_us = _median(measure, num_repeats)
        rates[num_sms] = num_bytes / took_us * 1e-3
        record.add(f"highest rate of {num_sms} SMs", gbytes_per_s=rates[num_sms], measured_us=took_us)
    plain_us = _median(lambda: bench.elapsed_us(bench.transfer(num_bytes).deliver), num_repeats)
    record.add("copy by torch", gbytes_per_s=num_bytes / plain_us * 1e-3, measured_us=plain_us)
    return rates


def _one_message(
    bench: Bench, link: PacedLink, num_bytes: int, num_repeats: int, stamps: list[int]
) -> dict[str, int | float]:
    """Time of a message between two events, and on the link by the device's clock."""
    on_link_us = []

    def measure() -> float:
        took_us = bench.elapsed_us(lambda: bench.send(link, num_bytes))
        start_ns, end_ns = link.last_times_ns()
        on_link_us.append((end_ns - start_ns) * 1e-3)
        stamps.extend((start_ns, end_ns))
        return took_us

    measured_us = _median(measure, num_repeats)
    expected_us = link.link.time_us(num_bytes)
    return {
        "bytes": num_bytes,
        "blocks": link.num_sms,
        "expected_us": expected_us,
        "measured_us": measured_us,
        "error_share": measured_us / expected_us - 1,
        "on_link_us": statistics.median(on_link_us),
    }


def _judge(record: Recorder, name: str, found: dict[str, int | float], is_judged: bool) -> None:
    """Saves a message, as an error if it does not keep to the formula although its SMs could."""
    off_us = abs(found["measured_us"] - found["launch_us"] - found["expected_us"])
    rate = found["bytes"] / max(found["expected_us"] - LATENCY_US, 1e-3) * 1e-3
    could = rate <= _RESERVE * found["copied_gbytes_per_s"]
    if is_judged and could and off_us > _TOLERANCE * found["expected_us"] + _TOLERANCE_US:
        record.fail(name, f"{off_us:.1f} us off, next to the launch; at most 2 % and 2 us were expected", **found)
    else:
        record.add(name, **found)


def _two_streams(bench: Bench, link: PacedLink, num_bytes: int, num_repeats: int) -> dict[str, int | float]:
    """Two messages that are ready at the same time on streams of their own: the link carries one after the other."""
    streams = [torch.cuda.Stream() for _ in range(2)]

    def enqueue() -> None:
        current = torch.cuda.current_stream()
        for place, stream in enumerate(streams):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                bench.send(link, num_bytes, offset=place * num_bytes)
        for stream in streams:
            current.wait_stream(stream)

    measured_us = _median(lambda: bench.elapsed_us(enqueue), num_repeats)
    expected_us = 2 * link.link.time_us(num_bytes)
    return {
        "bytes": 2 * num_bytes,
        "blocks": link.num_sms,
        "expected_us": expected_us,
        "measured_us": measured_us,
        "error_share": measured_us / expected_us - 1,
    }
