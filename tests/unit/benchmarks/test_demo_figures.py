"""What the short demo says about the steps of both variants, on the screen, in a sentence and in a picture."""

import io
import json
import math
import os
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from benchmarks.demo.__main__ import parse_arguments
from benchmarks.demo.claim import claim, conditions
from benchmarks.demo.display import Display
from benchmarks.demo.links.paced import Pace, PacedTransport, PacedWire
from benchmarks.demo.links.rank_link import RankLink
from benchmarks.demo.links.reductions import Reductions, reduced_bytes
from benchmarks.demo.picture import draw
from benchmarks.demo.rank import core_attention
from benchmarks.demo.steps import OURS, STOCK, Comparison, RankStep, Step
from benchmarks.demo.training import common_attention, turns, unmeasured_steps
from benchmarks.harness.disturbance import CpuTimes, Disturbance, disturbance, parse_memory_stalls, parse_stat
from megatron_lancet.errors import UsageError
from megatron_lancet.patching import replaced
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

TIMELINE = RankTimeline(
    0,
    (
        Span("L1.c1.F.attention", Lane.COMPUTE, 0.0, 4.0),
        Span("L1.c0.F.dispatch", Lane.COMM, 1.0, 6.0, 100),
        Span("L1.c0.F.dispatch", Lane.WAIT, 4.0, 6.0),
    ),
    10.0,
)


def step(
    number: int, step_ms: float, waited_ms: float, loss: float = 5.0, timeline: RankTimeline | None = None
) -> Step:
    """The second rank is 10 ms faster, waits 20 ms less for all-to-alls, and 4 ms more for reductions."""
    ranks = [(step_ms, waited_ms, 6.0, timeline), (step_ms - 10, waited_ms - 20, 10.0, None)]
    return Step(
        [RankStep(number, loss, ms, waited, reduced, 1000, 64, traced) for ms, waited, reduced, traced in ranks]
    )


@pytest.fixture
def comparison():
    found = Comparison(unmeasured=[1])
    for number, (stock_ms, ours_ms) in enumerate([(900, 100), (190, 110), (200, 100), (240, 90)], start=1):
        found.add(STOCK, number, step(number, stock_ms, 90))
        found.add(OURS, number, step(number, ours_ms, 20, loss=5.0 + 1e-6 * number))
    return found


def test_comparison_has_medians_of_the_measured_steps_of_both(comparison):
    comparison.add(STOCK, 5, step(5, 9000, 90))  # ours has not done this one yet
    summary = comparison.summary()
    assert (summary["stock_step_ms"], summary["step_ms"]) == (200, 100)
    assert (summary["stock_exposed_ms"], summary["exposed_ms"]) == (80, 10)
    assert (summary["stock_reduced_ms"], summary["reduced_ms"]) == (8, 8)
    assert (summary["tokens_per_s"], summary["num_measured_steps"]) == (640, 3)


def test_speedup_is_of_steps_with_the_same_number(comparison):
    ratios = [190 / 110, 200 / 100, 240 / 90]
    assert (comparison.speedup.low, comparison.speedup.median, comparison.speedup.high) == tuple(ratios)
    comparison.add(STOCK, 5, step(5, 300, 90))
    comparison.add(OURS, 5, step(5, 100, 20))
    low, high = comparison.summary()["speedup_quartiles"]
    assert comparison.summary()["speedup"] == pytest.approx((ratios[1] + ratios[2]) / 2)
    assert (low, high) == pytest.approx(((ratios[0] + 3 * ratios[1]) / 4, (3 * ratios[2] + 3) / 4))


def test_summary_has_the_samples_that_it_is_made_of(comparison):
    found = json.loads(json.dumps({**comparison.summary(), "iterations": 4}))
    assert found["measured_steps"] == [2, 3, 4]
    assert Comparison.read(found).summary() == comparison.summary()


def test_loss_difference_is_largest_of_all_steps_also_of_warm_up(comparison):
    assert comparison.max_loss_difference == pytest.approx(4e-6 / 5, rel=1e-6)
    comparison.add(OURS, 1, step(1, 100, 20, loss=5.5))
    assert comparison.max_loss_difference == pytest.approx(0.1)
    comparison.add(OURS, 2, step(2, 100, 20, loss=math.nan))
    assert comparison.max_loss_difference == math.inf


def of_demo(comparison: Comparison, **changes: Any) -> dict[str, Any]:
    """Returns the claim's input."""
    rest = {"link": "namespaces, 50 Mbit/s", "wanted_share": 0.45, "attention": "DotProductAttention"}
    return {**comparison.summary(), **rest, "plan": "chunks=2 dim=batch range=stack", **changes}


def test_claim_has_the_measured_figures_and_what_they_hold_for(comparison):
    summary = of_demo(comparison)
    figures = "ours is 2.00x faster (quartiles 1.73 to 2.67) and waits for 10 % of its step; losses agree to 8e-7."
    assert claim(summary) == f"On a link set so that stock waits for 45 % of its step (40 % in this run), {figures}"
    assert conditions(summary) == (
        "Both run the same attention kernel (Megatron's unfused core attention), reduce gradients over the link of the "
        "all-to-alls, and keep freed memory between steps. Ours runs a fixed plan (chunks=2 dim=batch). The figures "
        "are medians over 3 steps of each, in turns; a ratio is of two steps with the same number."
    )
    assert "torch's fused attention" in conditions({**summary, "attention": "SdpaAttention"})
    assert claim({**summary, "link": "paced, 9 Mbit/s"}).startswith("On a paced transport set so that")
    asked = claim({**summary, "link": "paced, 9 Mbit/s", "wanted_share": None})
    assert asked.startswith("On a link (paced, 9 Mbit/s) on which stock waits for 40 % of its step, ours is 2.00")
    for number in range(1, 5):
        comparison.add(OURS, number, step(number, 100, 20))
    assert claim(of_demo(comparison)).endswith("losses agree to the bit.")


def test_different_attention_kernels_are_not_compared():
    assert common_attention("SdpaAttention", "SdpaAttention") == "SdpaAttention"
    with pytest.raises(UsageError, match=r"stock runs DotProductAttention and ours SdpaAttention: .*can't be compared"):
        common_attention("DotProductAttention", "SdpaAttention")


def test_core_attention_is_that_of_the_model():
    layers = [torch.nn.Module() for _ in range(2)]
    for layer in layers:
        layer.core_attention = torch.nn.Identity()
    stages = [torch.nn.Sequential(torch.nn.Linear(1, 1), layer) for layer in layers]
    assert core_attention(stages) == "Identity"
    layers[1].core_attention = torch.nn.ReLU()
    assert core_attention(stages) == "Identity+ReLU"


def test_typical_step_is_traced_and_measured_one_near_median(comparison):
    assert comparison.typical(STOCK) is None
    slow, near = (RankTimeline(0, (), step_ms) for step_ms in (240.0, 190.0))
    comparison.add(STOCK, 1, step(1, 200, 90, timeline=TIMELINE))
    comparison.add(STOCK, 4, step(4, 240, 90, timeline=slow))
    comparison.add(STOCK, 2, step(2, 190, 90, timeline=near))
    assert comparison.typical(STOCK) == near


def test_turns_cover_each_step_once_and_stop_at_the_checkpoint():
    found = turns(num_steps=14, middle=7)
    assert [list(steps) for steps in found] == [[1, 2, 3, 4], [5, 6, 7], [8], [9, 10, 11, 12], [13, 14]]
    assert unmeasured_steps(20) == [*range(1, 23)]


def test_demo_refuses_a_run_that_is_too_short_to_measure(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--train-iters", "15"])
    assert "at least 16" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_display_redraws_its_lines_on_a_terminal(comparison, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((100, 30)))
    out = Terminal()
    display = Display(comparison, 32, out)
    display.step()
    display.say("said above")
    before, after = out.getvalue().split("said above\n")
    assert before.endswith("\x1b[4F\x1b[J")
    assert "stock" in after
    assert "2.20 times as fast" in after  # 220 ms, the median of all four steps, to 100 ms


def test_display_has_no_escapes_and_few_lines_without_a_terminal(comparison):
    out = io.StringIO()
    display = Display(comparison, 32, out)
    display.step()
    assert out.getvalue() == ""
    display.turn(range(3, 5))
    assert out.getvalue() == (
        "      steps  3 to  4: stock  220 ms, waits  36%, loss 5.00000 | ours   95 ms, waits  11%, loss 5.00000\n"
    )


def test_picture_says_what_it_shows(comparison):
    figure = draw(TIMELINE, TIMELINE, of_demo(comparison, link="paced, 100 Mbit/s"))
    stock, ours = figure.axes
    assert stock.get_title("left") == "stock Megatron: this step 10 ms (median 200 ms), 20% of it waiting"
    assert ours.get_title("left").startswith("Megatron-Lancet: this step 10 ms (median 100 ms)")
    assert "paced" in ours.get_xlabel()
    assert figure.get_suptitle() == ("Stock waited 40 % of its step, ours 10 %: 2.00x faster (quartiles 1.73 to 2.67)")


class Below:
    """A transport that notes what it gets."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def launch(self, received, sent, receive_rows, send_rows, ready=None):
        if not len(sent):
            raise RuntimeError("the peer is gone")
        self.sent.append(len(sent))
        return Arrived()


class Arrived:
    def done(self) -> bool:
        return True

    def wait(self) -> None: ...

    def interval(self) -> tuple[float, float]:
        return 1e9, 2e9


def test_paced_transport_keeps_order_and_raises_errors():
    below, stats = Below(), CommStats(torch.device("cpu"))
    paced = PacedTransport(below, rank=0, wire=PacedWire(Pace(1e12)), stats=stats)
    transfers = [paced.launch(torch.empty(0), torch.ones(rows, 4), [0, 0], [rows, 0]) for rows in (3, 1, 2, 0)]
    for transfer in transfers[:3]:
        transfer.wait()
    assert below.sent == [3, 1, 2]
    assert transfers[0].done()
    assert transfers[0].interval()[1] == 2e9
    with pytest.raises(RuntimeError, match="peer is gone"):
        transfers[3].wait()


def buckets(num_ranks: int, is_sharded: bool = False) -> Any:
    """Returns a group of two buckets of 40 and 60 floats."""
    group = SimpleNamespace(size=lambda: num_ranks)
    found = object.__new__(_ParamAndGradBucketGroup)
    found.ddp_config = SimpleNamespace(use_distributed_optimizer=is_sharded)
    found.data_parallel_group = found.intra_distributed_optimizer_instance_group = group
    found.buckets = [SimpleNamespace(grad_data=torch.zeros(numel)) for numel in (40, 60)]
    found.grad_reduce_handle = None
    return found


def test_reduction_sends_parts_and_sums_around_a_ring():
    assert [reduced_bytes(buckets(num_ranks)) for num_ranks in (1, 2, 4)] == [0, 400, 600]
    assert reduced_bytes(buckets(2, is_sharded=True)) == 200


class Wire:
    """A paced link that records its messages. A message has been sent once the reduction is waited for."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send(self, num_bytes: int, launch: Any) -> tuple[float, Future[None]]:
        self.sent.append(num_bytes)
        return 0.0, Passing(self)


class Passing(Future[None]):
    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def result(self, timeout: float | None = None) -> None:
        self._wire.sent.append(-1)


@pytest.mark.parametrize("overlaps", [False, True], ids=["at once", "--overlap-grad-reduce"])
def test_reductions_pass_the_paced_link_once_and_are_waited_for(overlaps):
    wire, calls = Wire(), []

    def start(self):
        calls.append("start")

    def finish(self):
        if not overlaps:
            self.start_grad_sync()
        calls.append("finish")

    reductions, group = Reductions(wire), _ParamAndGradBucketGroup
    with replaced(group, "start_grad_sync", start), replaced(group, "finish_grad_sync", finish), reductions.watched():
        for _ in range(2):
            one = buckets(2)
            if overlaps:
                one.start_grad_sync()
            one.finish_grad_sync()
    assert calls == ["start", "finish"] * 2
    assert wire.sent == [400, -1] * 2
    assert reductions.take_waited_ms() > 0
    assert reductions.take_waited_ms() == 0


def test_megatrons_groups_are_made_on_the_link(monkeypatch):
    """In namespaces the kernel caps the link; the variable sets the interface of new groups."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "free")
    seen = []

    def initialize(size):
        seen.append((size, os.environ["GLOO_SOCKET_IFNAME"]))

    with replaced(parallel_state, "initialize_model_parallel", initialize), RankLink("shaped").carries_reductions():
        parallel_state.initialize_model_parallel(2)
    assert seen == [(2, "shaped")]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "free"


STAT = """cpu  999 0 999 999 0 0 0 9 0 0
cpu0 {busy} 0 100 5000 3 4 50 {steal} 0 0
cpu1 100 50 50 5000 3 4 50 0 0 0
cpu2 9999 0 9999 0 0 0 0 9999 0 0
"""


def test_stat_is_read_for_the_ranks_cores_without_interrupts():
    times = parse_stat(STAT.format(busy=200, steal=7), [0, 1])
    assert times == CpuTimes(busy_s=5.0, steal_s=0.07)


@pytest.mark.parametrize(
    ("own_s", "stolen_s", "disturbed"),
    [(19.0, 0.0, False), (19.9, 0.0, False), (15.0, 0.0, True), (19.9, 0.1, False), (19.9, 0.5, True)],
)
def test_what_others_use_and_what_is_stolen_disturbs(own_s, stolen_s, disturbed):
    seen = disturbance(CpuTimes(100, 1), CpuTimes(119.5, 1 + stolen_s), own_s, elapsed_s=10, num_cores=2)
    assert seen.is_disturbed is disturbed
    assert seen.others_share == pytest.approx(max(0, 19.5 - own_s) / 20)


@pytest.mark.parametrize(("share", "disturbed"), [(None, False), (0.005, False), (0.08, True)])
def test_stalls_of_memory_disturb(share, disturbed):
    assert Disturbance(0.0, 0.0, share).is_disturbed is disturbed


def test_stalls_of_all_tasks_are_read():
    pressure = "some avg10=9.0 avg60=9.0 avg300=9.0 total=99000000\nfull avg10=2.1 avg60=0.0 avg300=0.0 total=2500000"
    assert parse_memory_stalls(pressure) == 2.5


def test_a_disturbance_says_which():
    cpu = "2.0% of CPU time stolen by the hypervisor, 0.1% used by others"
    assert str(Disturbance(0.02, 0.001)) == cpu
    assert str(Disturbance(0.02, 0.001, 0.08)) == f"{cpu}, all tasks waited for memory in 8.0% of the time"
