"""What the short demo says about the steps of both variants, on the screen, in a sentence and in a picture."""

import io
import math
import os

import pytest
import torch

from benchmarks.demo.__main__ import parse_arguments
from benchmarks.demo.display import Display
from benchmarks.demo.paced import Pace, PacedTransport
from benchmarks.demo.picture import draw
from benchmarks.demo.steps import OURS, STOCK, Comparison, RankStep, Step, sentence
from benchmarks.demo.training import turns, unmeasured_steps
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
    """The second rank is 10 ms faster and waits 20 ms less."""
    ranks = [(step_ms, waited_ms, timeline), (step_ms - 10, waited_ms - 20, None)]
    return Step([RankStep(number, loss, time, waited, 1000, 64, traced) for time, waited, traced in ranks])


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
    assert (summary["stock_step_ms"], summary["step_ms"], summary["speedup"]) == (200, 100, 2.0)
    assert (summary["stock_exposed_ms"], summary["exposed_ms"]) == (80, 10)
    assert (summary["tokens_per_s"], summary["num_measured_steps"]) == (640, 3)


def test_loss_difference_is_the_largest_of_all_steps_also_of_warm_up(comparison):
    assert comparison.max_loss_difference == pytest.approx(4e-6 / 5, rel=1e-6)
    comparison.add(OURS, 1, step(1, 100, 20, loss=5.5))
    assert comparison.max_loss_difference == pytest.approx(0.1)
    comparison.add(OURS, 2, step(2, 100, 20, loss=math.nan))
    assert comparison.max_loss_difference == math.inf


def test_sentence_has_the_measured_figures(comparison):
    assert sentence(comparison.summary()) == (
        "stock waited 40 % of each step, ours 10 %: 2.00 times as fast, loss equal to 8e-7"
    )
    for number in range(1, 5):
        comparison.add(OURS, number, step(number, 100, 20))
    assert sentence(comparison.summary()).endswith("loss equal to the bit")


def test_typical_step_is_a_traced_and_measured_one_near_the_median(comparison):
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
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((100, 30)))
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
    figure = draw(TIMELINE, TIMELINE, {**comparison.summary(), "link": "paced, 100 Mbit/s"})
    stock, ours = figure.axes
    assert stock.get_title("left") == "stock Megatron: this step 10 ms (median 200 ms), 20% of it waiting"
    assert ours.get_title("left").startswith("Megatron-Lancet: this step 10 ms (median 100 ms)")
    assert "paced" in ours.get_xlabel()
    assert figure.get_suptitle().startswith("Stock waited 40 %")


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


def test_paced_transport_hands_messages_on_in_their_order_and_raises_what_they_raise():
    below, stats = Below(), CommStats(torch.device("cpu"))
    paced = PacedTransport(below, rank=0, pace=Pace(1e12), stats=stats)
    transfers = [paced.launch(torch.empty(0), torch.ones(rows, 4), [0, 0], [rows, 0]) for rows in (3, 1, 2, 0)]
    for transfer in transfers[:3]:
        transfer.wait()
    assert below.sent == [3, 1, 2]
    assert transfers[0].done()
    assert transfers[0].interval()[1] == 2e9
    with pytest.raises(RuntimeError, match="peer is gone"):
        transfers[3].wait()
