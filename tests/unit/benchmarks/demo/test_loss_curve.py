"""The picture shows the run: both parts, the validation loss, and the entropy to beat."""

import math

import numpy as np
import pytest

from benchmarks.demo.training_log.loss_curve import LossCurve, draw, smoothed, write_png
from benchmarks.demo.training_log.train_log import Iteration, RunLog, Validation

LOSSES = [6.0, 5.0, math.nan, 4.0, 3.5, 3.25]


def curve(resumed_after: int | None = 3) -> LossCurve:
    steps = [Iteration(i, len(LOSSES), loss, 100.0) for i, loss in enumerate(LOSSES, start=1)]
    run = RunLog(steps, Validation(len(LOSSES), 3.5))
    return LossCurve("a run", run, tokens_per_iteration=500, resumed_after=resumed_after, unigram_entropy=5.5)


def test_loss_smoothing_averages_the_steps_around_each():
    assert smoothed([6.0, 4.0, 2.0, 3.0, 9.0], span=3).tolist() == pytest.approx([6.0, 4.0, 3.0, 14 / 3, 6.0])


def test_loss_smoothing_keeps_a_straight_line():
    line = np.linspace(6.0, 3.0, 80)
    assert smoothed(line, span=25)[:68] == pytest.approx(line[:68])


def test_loss_smoothing_leaves_nan_out():
    assert smoothed([6.0, math.nan, 2.0], span=3)[1] == 4.0
    assert math.isnan(smoothed([math.nan], span=3)[0])


def test_loss_curve_shows_losses_reference_lines_and_units():
    axes = draw(curve()).axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["lm loss of each step"].get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert lines["lm loss of each step"].get_ydata() == pytest.approx(LOSSES, nan_ok=True)
    assert set(lines["unigram entropy of the corpus: 5.50"].get_ydata()) == {5.5}
    assert (*lines["validation loss: 3.50"].get_xdata(), *lines["validation loss: 3.50"].get_ydata()) == (6, 3.5)
    assert set(lines["resumed from the checkpoint of step 3"].get_xdata()) == {3}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("training iteration", "loss (nats per token)")
    bottom, top = axes.get_ylim()
    assert bottom < 3.25
    assert top > 6.0


def test_loss_curve_of_a_run_in_one_part_has_no_resume_line():
    labels = [str(line.get_label()) for line in draw(curve(resumed_after=None)).axes[0].get_lines()]
    assert not any("resumed" in label for label in labels)


def test_loss_curve_is_written_as_one_png(tmp_path):
    path = tmp_path / "loss_curve.png"
    path.write_text("an older picture")
    write_png(curve(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]
