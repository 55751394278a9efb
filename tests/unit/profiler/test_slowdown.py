"""The slowdown during a message, on devices whose clock is the test's."""

import pytest
import torch

from megatron_lancet.profiler import slowdown
from megatron_lancet.profiler.slowdown import ChunkSizes, copy, gemm, measure_slowdowns
from tests.fake_events import FakeDevice

SIZES = ChunkSizes(tokens=512, topk=2, hidden=8, ffn=16, dtype=torch.float32)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MESSAGE_MS = 10.0
GEMM_FACTOR, COPY_FACTOR = 1.5, 1.25


class Machine:
    """Kernels take a millisecond for each ``rows_per_ms`` rows, and longer while a message is in flight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows_per_ms: int) -> None:
        self.device = FakeDevice(monkeypatch)
        self.in_flight = False
        self.rows: set[int] = set()
        self.log: list[str] = []
        self._rows_per_ms = rows_per_ms
        monkeypatch.setattr(slowdown.time, "perf_counter", lambda: self.device.now_ms / 1e3)
        monkeypatch.setattr(slowdown, "from_all_ranks", lambda value: [value])
        monkeypatch.setattr(slowdown.dist, "barrier", lambda: None)
        monkeypatch.setattr(slowdown, "gemm", lambda sizes, rows, device: self._kernel(rows, GEMM_FACTOR))
        monkeypatch.setattr(slowdown, "copy", lambda sizes, rows, device: self._kernel(rows, COPY_FACTOR))

    def _kernel(self, rows: int, factor: float):
        def run() -> None:
            self.device.now_ms += rows / self._rows_per_ms * (factor if self.in_flight else 1.0)
            if self.in_flight:
                self.rows.add(rows)
            self.log.append("kernel")

        return run

    def start(self) -> "Machine":
        self.in_flight = True
        self.log.append("message")
        return self

    def wait(self) -> None:
        self.in_flight = False
        self.log.append("wait")


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_slowdowns_of_products_and_copies_are_apart(monkeypatch, device):
    machine = Machine(monkeypatch, rows_per_ms=1000)
    assert measure_slowdowns(SIZES, machine.start, MESSAGE_MS, device) == pytest.approx((GEMM_FACTOR, COPY_FACTOR))
    assert machine.rows == {SIZES.tokens, SIZES.tokens * SIZES.topk}


def test_slowdown_kernels_fit_into_the_message(monkeypatch):
    machine = Machine(monkeypatch, rows_per_ms=100)
    measure_slowdowns(SIZES, machine.start, MESSAGE_MS, CPU)
    # Four kernels in 8 ms: 200 rows at most.
    assert machine.rows == {128}
    beside = "".join(entry[0] for entry in machine.log).split("m")[1:]
    assert {len(kernels.split("w")[0]) for kernels in beside} == {int(0.8 * MESSAGE_MS / 1.28)}


def test_slowdown_kernels_are_enqueued_behind_others_on_cuda(monkeypatch):
    machine = Machine(monkeypatch, rows_per_ms=100_000)
    measure_slowdowns(SIZES, machine.start, MESSAGE_MS, CUDA)
    log = "".join(entry[0] for entry in machine.log)
    # 64 products of 0.005 ms are timed; launching them and the message takes the host less than 64 others take.
    assert "k" * 64 + "m" + "k" * 64 + "w" in log


def test_slowdown_kernels_take_little_memory(monkeypatch):
    machine = Machine(monkeypatch, rows_per_ms=10**9)
    seen = []

    def kernel(sizes, rows, device):
        seen.append((sizes, rows))
        return machine._kernel(rows, 1.0)

    monkeypatch.setattr(slowdown, "gemm", kernel)
    monkeypatch.setattr(slowdown, "copy", kernel)
    large = ChunkSizes(tokens=1 << 16, topk=8, hidden=8192, ffn=1 << 16, dtype=torch.bfloat16)
    measure_slowdowns(large, machine.start, MESSAGE_MS, CPU)
    (product, product_rows), (moved, moved_rows) = seen
    elements = product_rows * large.hidden, large.hidden * product.ffn, product_rows * product.ffn
    assert max(*elements, moved_rows * moved.hidden) * large.dtype.itemsize <= 64 << 20


def test_slowdown_is_never_a_gain(monkeypatch):
    machine = Machine(monkeypatch, rows_per_ms=1000)
    monkeypatch.setattr(slowdown, "copy", lambda sizes, rows, device: machine._kernel(rows, 0.5))
    assert measure_slowdowns(SIZES, machine.start, MESSAGE_MS, CPU) == pytest.approx((GEMM_FACTOR, 1.0))


def test_slowdown_kernels_have_the_models_sizes():
    assert gemm(SIZES, 64, CPU)().shape == (64, SIZES.ffn)
    assert copy(SIZES, 64, CPU)().shape == (64, SIZES.hidden)
