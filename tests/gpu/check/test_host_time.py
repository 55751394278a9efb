"""The part of the check that measures the host's time of each op."""

import pytest
import torch

from benchmarks.gpu.check.part import cpu_time, host_time
from benchmarks.gpu.variants import Runner
from megatron_lancet.patching import around
from megatron_lancet.schedule.ops import Op
from tests.gpu.check.rehearsed import rehearsed

OPS = ("attention", "route", "preprocess", "experts", "postprocess")
CHUNKS = {"one chunk": 1, "two sequence chunks": 2, "pairs": 1}


@pytest.mark.timeout(300)
def test_each_op_and_message_is_measured_as_often_as_it_runs(tmp_path):
    found = rehearsed(host_time.run, tmp_path)
    assert not [result for result in found.values() if "error" in result]
    for variant, num_chunks in CHUNKS.items():
        for phase in ("F", "I"):
            for op in OPS:
                assert found[f"{variant}: {phase}.{op}"]["calls_per_layer"] == num_chunks
            for verb in ("launch", "send", "wait"):
                for message in ("dispatch", "combine"):
                    assert found[f"{variant}: {phase}.{verb} {message}"]["calls_per_layer"] == num_chunks
        assert found[f"{variant}: F.launch counts"]["calls_per_layer"] == num_chunks
        assert found[f"{variant}: F.read counts"]["calls_per_layer"] == num_chunks
        assert found[f"{variant}: reports to DDP"]["calls_per_layer"] > 4
        of_ops = [result for name, result in found.items() if name.startswith(f"{variant}: ")]
        summary = found[variant]
        assert all(result["us_per_call"] > 0 for result in of_ops)
        assert summary["us_per_layer"] == pytest.approx(sum(result["us_per_layer"] for result in of_ops), rel=1e-3)
        assert summary["us_per_layer"] == pytest.approx(sum(summary["groups_us"].values()), rel=1e-3)
        assert set(summary["groups_us"]) == set(cpu_time.GROUPS) - {"whole layer"}
        assert summary["wait_us_per_layer"] > 0
    assert found["stock: F.layer"]["calls_per_layer"] == found["stock: I.layer"]["calls_per_layer"] == 1
    kernels = {name: found[name]["kernels_per_layer"] for name in host_time.VARIANTS}
    assert kernels["one chunk"] == kernels["pairs"] < kernels["stock"] < kernels["two sequence chunks"]


def test_variant_that_fails_is_an_error_and_others_are_measured(tmp_path):
    def step(stock, runner):
        if runner.setup is not None and runner.setup.plan.num_chunks == 2:
            raise RuntimeError("no memory")
        return stock(runner)

    with around(Runner, "step", step):
        found = rehearsed(host_time.run, tmp_path)
    assert found["two sequence chunks"]["error"] == "RuntimeError: no memory"
    assert found["pairs"]["us_per_layer"] > 0


class Clock:
    def __init__(self):
        self.now_ns = 0

    def thread_time_ns(self):
        return self.now_ns

    def pass_us(self, us):
        self.now_ns += us * 1000


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(cpu_time.time, "thread_time_ns", clock.thread_time_ns)
    return clock


def op(name):
    return Op.parse(f"L1.c0.I.{name}")


def test_time_of_a_part_is_without_the_parts_inside(clock):
    times = cpu_time.CpuTimes()
    times.begin_step()
    with times.part("outer"):
        clock.pass_us(5)
        with times.part("outer"):
            clock.pass_us(1)
        with times.part("inner"):
            clock.pass_us(20)
        clock.pass_us(2)
    assert times.of_layers == {"outer": [8], "inner": [20]}


def test_time_of_an_op_is_without_its_parts(clock):
    times = cpu_time.CpuTimes()
    times.begin_step()
    clock.pass_us(3)
    times.end(op("experts"))
    clock.pass_us(4)
    with times.part("message"):
        clock.pass_us(10)
        times.end(op("route"))  # inside of the part
        clock.pass_us(10)
    clock.pass_us(6)
    times.end(op("attention"))
    clock.pass_us(1)
    times.end(op("attention"))  # a second step of its end
    found = {name.removeprefix("I."): us for name, us in times.of_layers.items()}
    assert found == {"experts": [3], "route": [4], "message": [20], "attention": [7]}


def test_waits_for_the_device_and_ops_beside_layers_are_apart(clock):
    times = cpu_time.CpuTimes()
    with cpu_time.measured_calls(times):
        times.begin_step()
        with around(torch.cuda, "synchronize", lambda stock: clock.pass_us(50)), times.part("op"):
            clock.pass_us(1)
            with times.part(cpu_time._WAIT, False):
                torch.cuda.synchronize()
        times.end(Op.parse("F.head"))
    assert times.of_layers == {"op": [1]}
    assert times.beside == {"F.head": [0]}
    assert times.wait_us == 50


def test_every_op_has_a_group():
    assert cpu_time.group_of("F.launch counts") == cpu_time.group_of("I.route") == "router and counts"
    assert cpu_time.group_of("I.wait combine") == "messages"
    assert cpu_time.group_of("W") == "weight gradients"
    with pytest.raises(AssertionError, match="no group"):
        cpu_time.group_of("F.sleep")
