"""Megatron's log lines are read as they are, also where two ranks wrote into one line."""

import math

import pytest

from benchmarks.demo.training_log.train_log import (
    Iteration,
    RunLog,
    Validation,
    parse_iteration,
    parse_validation,
    results_text,
    tail,
)

LINE = (
    " [2026-01-02 03:04:05.678901] iteration       28/      30 | consumed samples:          448 | "
    "elapsed time per iteration (ms): 1112.3 | learning rate: 2.814339E-04 | global batch size:    16 | "
    "lm loss: 5.547318E+00 | load_balancing_loss: 1.073764E+00 | z_loss: 2.999345E+00 | loss scale: 1.0 | "
    "grad norm: 1.092 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
VALIDATION = (
    " validation loss at iteration 30 on validation set | lm loss value: 5.823087E+00 | lm loss PPL: 3.380138E+02 | \n"
)
REPORT = {"tokens_per_s": 4096.0, "plan": "chunks=2", "step_ms": 500.0, "exposed_ms": 20.0, "counts_exposed_ms": 5.0}


def test_train_log_reads_a_training_step():
    assert parse_iteration(LINE) == Iteration(28, 30, 5.547318, 1112.3)


@pytest.mark.parametrize("line", [f"WARNING: other rank{LINE}", LINE.rstrip() + "Evaluating iter 1/2\n"])
def test_train_log_reads_a_line_shared_by_two_ranks(line):
    assert parse_iteration(line) == parse_iteration(LINE)


def test_train_log_loss_of_a_step_without_one_is_nan():
    iteration = parse_iteration(LINE.replace(" lm loss: 5.547318E+00 |", ""))
    assert math.isnan(iteration.lm_loss)
    assert iteration.step_ms == 1112.3


def test_train_log_reads_nan():
    assert math.isnan(parse_iteration(LINE.replace("5.547318E+00", "nan")).lm_loss)


def test_train_log_reads_the_validation_loss():
    assert parse_validation(VALIDATION) == Validation(30, 5.823087)


@pytest.mark.parametrize("line", ["", "Evaluating iter 3/20\n", "saving checkpoint at iteration      15 to x\n"])
def test_train_log_ignores_other_lines(line):
    assert parse_iteration(line) is None
    assert parse_validation(line) is None


def fed(numbers: list[int], validated_at: int | None) -> RunLog:
    run = RunLog()
    for number in numbers:
        assert run.feed(LINE.replace("28/", f"{number}/")).number == number
    if validated_at is not None:
        assert run.feed(VALIDATION.replace("iteration 30", f"iteration {validated_at}")) is None
    return run


def test_train_log_is_complete_with_all_steps_and_a_validation():
    assert fed([1, 2, 3, 4], validated_at=4).is_complete(4)


@pytest.mark.parametrize(
    ("numbers", "validated_at"),
    [
        ([1, 2, 1, 2, 3, 4], 4),  # the second part began from nothing
        ([1, 2, 4], 4),
        ([1, 2, 3, 4], None),
        ([1, 2, 3, 4], 2),
        ([1, 2, 3], 3),
    ],
)
def test_train_log_is_incomplete_without_steps_or_validation(numbers, validated_at):
    assert not fed(numbers, validated_at).is_complete(4)


def test_run_results_are_read_from_log_and_report():
    results = fed([1, 2], validated_at=2).results(REPORT)
    assert results == {
        "validation_loss": 5.823087,
        "perplexity": pytest.approx(338.0138, rel=1e-5),
        "iterations": 2,
        "tokens_per_s": 4096.0,
        "plan": "chunks=2",
        "step_ms": 500.0,
        "exposed_ms": 25.0,
    }


@pytest.mark.parametrize(
    ("entropy", "verdict"), [(6.0, "the loss is 0.18 below it"), (5.5, "the loss is not yet below it")]
)
def test_results_text_compares_the_loss_with_the_unigram_entropy(entropy, verdict):
    text = results_text({**fed([1, 2], validated_at=2).results(REPORT), "unigram_entropy": entropy, "seconds": 125.4})
    assert "2 steps, 2 min 5 s in total" in text
    assert "validation loss    5.823 nats per token, perplexity 338.0" in text
    assert f"unigram entropy    {entropy:.3f} nats per token of the whole corpus: {verdict}" in text
    assert "5.0 % of the step, waiting for all-to-alls" in text


def test_log_tail_names_the_log_and_shows_its_end(tmp_path):
    log = tmp_path / "train.log"
    log.write_bytes(b"".join(b"line %d\n" % i for i in range(50)) + b"\xff\n")
    assert tail(log, num_lines=3) == f"{log}:\n  line 48\n  line 49\n  \ufffd"


def test_log_tail_ends_where_torchrun_names_the_failed_rank(tmp_path):
    failed = (
        "E0102 03:04:05.6 12 site-packages/torch/distributed/elastic/x/api.py:1002] failed (exitcode: 2) local_rank: 0"
    )
    log = tmp_path / "train.log"
    log.write_text("error: the reason\n" + failed + "\n" + "Traceback of the launcher\n" * 50)
    assert tail(log) == f"{log}:\n  error: the reason\n  {failed}"
