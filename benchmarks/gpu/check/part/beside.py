"""A GEMM during a message: what the message's SMs cost the GEMM, and how late the message starts.

A persistent GEMM has one block on each SM until its end. So a message next to it waits for SMs, and a GEMM that is
launched during a message finds fewer SMs and may take two waves. A carve-out is torch's setting that leaves SMs free.
By torch's sources a plain GEMM keeps to it in cuBLASLt only, and torch prefers cuBLAS.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import grouped_mm

from benchmarks.gpu.check.part.link import LATENCY_US, NUM_SMS, RATES, Bench
from benchmarks.gpu.check.place import Place
from benchmarks.gpu.record import Recorder
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.paced_link import PacedLink

_BLOCKED_US = 3000.0
_MIN_LEFT_S = 2.0
_SET_CARVE_OUT = "_set_sm_carveout_experimental"
_NONE, _CARVED, _CARVED_LT = "no carve-out", "with carve-out", "with carve-out, cuBLASLt"


@dataclass(frozen=True)
class Sizes:
    """Shapes of the GEMMs.

    Attributes:
        rows, inner, columns: of the plain GEMM.
        num_experts, expert_rows, expert_inner, expert_columns: of the grouped one.
        num_repeats: measurements of each kind.
    """

    rows: int
    inner: int
    columns: int
    num_experts: int
    expert_rows: int
    expert_inner: int
    expert_columns: int
    num_repeats: int


REAL = Sizes(4096, 8192, 8192, 16, 2048, 2048, 768, num_repeats=5)
TINY = Sizes(32, 64, 64, 2, 16, 32, 16, num_repeats=2)


@dataclass(frozen=True)
class Product:
    """A GEMM that is repeated.

    Attributes:
        multiply: enqueues it.
        num_times: how often it runs during a message, which takes as long as all of them alone.
        carve_outs: ways to leave SMs free.
    """

    name: str
    multiply: Callable[[], Any]
    flops: int
    num_times: int
    carve_outs: Sequence[str] = (_NONE, _CARVED)


def run(record: Recorder, place: Place) -> None:
    """Runs this part of the check."""
    sizes = TINY if place.is_rehearsal else REAL
    has_carve_out = hasattr(torch._C, _SET_CARVE_OUT)
    record.add("carve-out", is_available=has_carve_out)
    for product in _products(sizes):
        for num_sms in NUM_SMS:
            for way in product.carve_outs if has_carve_out else product.carve_outs[:1]:
                if record.time_left_s() < _MIN_LEFT_S:
                    record.add("stopped", why="no time is left")
                    return
                name = f"{product.name}, {num_sms} SMs, {way}"
                with record.guarded(name), place.watch(), _carved_out(num_sms, way):
                    _measure(record, name, product, num_sms, sizes.num_repeats)


def _products(sizes: Sizes) -> list[Product]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float32).bfloat16()

    a, b = random(sizes.rows, sizes.inner), random(sizes.inner, sizes.columns)
    num_rows = sizes.num_experts * sizes.expert_rows
    rows = random(num_rows, sizes.expert_inner)
    weights = random(sizes.num_experts, sizes.expert_columns, sizes.expert_inner).transpose(1, 2)
    ends = torch.arange(1, sizes.num_experts + 1, device="cuda", dtype=torch.int32) * sizes.expert_rows
    return [
        Product("GEMM", lambda: a @ b, 2 * sizes.rows * sizes.inner * sizes.columns, 4, (_NONE, _CARVED, _CARVED_LT)),
        Product(
            "grouped GEMM",
            lambda: grouped_mm(rows, weights, offs=ends),
            2 * num_rows * sizes.expert_inner * sizes.expert_columns,
            12,
        ),
    ]


@contextmanager
def _carved_out(num_sms: int, way: str) -> Iterator[None]:
    """Inside the context torch's GEMMs leave this number of SMs free, in one of the ways."""
    if way == _NONE:
        yield
        return
    library = torch.backends.cuda.preferred_blas_library()
    if way == _CARVED_LT:
        torch.backends.cuda.preferred_blas_library("cublaslt")
    getattr(torch._C, _SET_CARVE_OUT)(num_sms)
    try:
        yield
    finally:
        getattr(torch._C, _SET_CARVE_OUT)(None)
        torch.backends.cuda.preferred_blas_library(library)


def _measure(record: Recorder, name: str, product: Product, num_sms: int, num_repeats: int) -> None:
    """A product alone and during a message, on streams of both priorities."""
    blocker = Bench(0, _BLOCKED_US)
    alone = [_alone(product, blocker) for _ in range(1 + num_repeats)][1:]
    alone_ms = statistics.median(ms for times in alone for ms in times)
    link = PacedLink(Link(LATENCY_US, RATES[0]), num_sms)
    num_bytes = round(product.num_times * alone_ms * 1e-3 * RATES[0] * 1e9)
    bench = Bench(num_bytes, _BLOCKED_US)
    message_us = statistics.median(
        [bench.elapsed_us(lambda: bench.send(link, num_bytes)) for _ in range(1 + num_repeats)][1:]
    )
    lowest, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # it is static; torch's stub differs
    for priority in (highest, lowest):
        stream = torch.cuda.Stream(priority=priority)
        found = [_beside(product, bench, link, num_bytes, stream) for _ in range(1 + num_repeats)][1:]
        each_ms = [statistics.median(times) for times in zip(*(one.gemms_ms for one in found), strict=True)]
        beside_ms = statistics.mean(each_ms)
        record.add(
            f"{name}, {'high' if priority == highest else 'normal'} priority",
            blocks=num_sms,
            alone_ms=alone_ms,
            beside_ms=beside_ms,
            slowdown=beside_ms / alone_ms,
            each_ms=each_ms,
            tflops_alone=product.flops / alone_ms * 1e-9,
            bytes=num_bytes,
            expected_us=link.link.time_us(num_bytes),
            message_alone_us=message_us,
            message_beside_us=statistics.median(one.message_us for one in found),
            late_us=statistics.median(one.late_us for one in found),
        )


def _alone(product: Product, bench: Bench) -> list[float]:
    """Times of the products, in milliseconds, without a message."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(product.num_times + 1)]
    torch.cuda.synchronize()
    bench.block()
    product.multiply()
    events[0].record()
    for event in events[1:]:
        product.multiply()
        event.record()
    torch.cuda.synchronize()
    return [one.elapsed_time(other) for one, other in itertools.pairwise(events)]


@dataclass(frozen=True)
class Beside:
    """Products and a message that were ready at the same time.

    Attributes:
        gemms_ms: time of each product.
        message_us: from then to the end of the message.
        late_us: of it, before the message's time on the link began, and behind its last piece.
    """

    gemms_ms: list[float]
    message_us: float
    late_us: float


def _beside(product: Product, bench: Bench, link: PacedLink, num_bytes: int, stream: torch.cuda.Stream) -> Beside:
    """The message is ready when a first product ends, and the others follow that one without a gap."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(product.num_times + 1)]
    done = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    bench.block()
    product.multiply()
    events[0].record()
    stream.wait_event(events[0])
    with torch.cuda.stream(stream):
        bench.send(link, num_bytes)
        done.record()
    for event in events[1:]:
        product.multiply()
        event.record()
    torch.cuda.current_stream().wait_event(done)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        start_ns, end_ns = link.last_times_ns()
    message_us = events[0].elapsed_time(done) * 1e3
    gemms_ms = [one.elapsed_time(other) for one, other in itertools.pairwise(events)]
    return Beside(gemms_ms, message_us, message_us - (end_ns - start_ns) * 1e-3)
