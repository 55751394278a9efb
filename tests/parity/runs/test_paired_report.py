"""What a run of paired steps reports: its table, its timeline and Megatron's timers."""

import itertools
import json

import pytest

from megatron_lancet.lab.views.trace_file import TRACE_FILE, read_trace
from megatron_lancet.planning.plan_file import PlanFile, write_plan_file
from megatron_lancet.schedule.plan import fixed_plan, paired
from megatron_lancet.schedule.timeline import Lane
from tests.ranks.pretraining import EP2, pretrain

pytestmark = pytest.mark.distributed

NUM_MICRO_BATCHES = 4


@pytest.fixture(scope="module")
def report(token_data, tmp_path_factory):
    """What a run printed, its report and its timeline."""
    folder = tmp_path_factory.mktemp("paired")
    plan_file = folder / "plan.json"
    write_plan_file(plan_file, PlanFile(paired(fixed_plan(1))))
    flags = ["--global-batch-size", 2 * 4 * NUM_MICRO_BATCHES, "--timing-log-level", 2, "--lancet-plan", plan_file]
    run = pretrain(token_data, [*EP2, *flags, "--lancet-report", folder], folder, train_iters=6)
    return "\n".join(run.outputs), json.loads((folder / "report.json").read_text()), read_trace(folder / TRACE_FILE)


def test_report_is_of_pairs(report):
    text, figures, _ = report
    assert figures["plan"].endswith(" paired")
    assert figures["num_dw_in_gaps"] + figures["num_dw_early"] + figures["num_dw_late"] > 0
    assert "for messages of forwards" in text


def test_timers_of_forwards_and_backwards_overlap(report):
    """Megatron's timers start and stop on two threads, and each includes the turns of the other."""
    text, _, _ = report
    for timer in ("forward-compute ...", "backward-compute ..."):
        assert text.count(timer) == 6


def test_timeline_has_both_of_a_pair_one_after_the_other(report):
    _, figures, record = report
    for timeline in record.measured:
        own = [span for span in timeline.spans if span.lane is not Lane.COMM]
        assert all(before.end_ms <= after.start_ms + 1e-3 for before, after in itertools.pairwise(own))
        names = [span.name for span in timeline.spans if span.lane is Lane.COMM]
        for phase in "FI":
            assert names.count(f"L2.c0.{phase}.dispatch") == NUM_MICRO_BATCHES
    waits_ms = sum(timeline.exposed_ms() for timeline in record.measured) / len(record.measured)
    assert figures["exposed"]["measured_ms"] == pytest.approx(waits_ms, abs=0.1)


def test_causes_of_a_paired_step_sum_to_its_waits(report):
    """Each message and wait of four micro-batches is replayed on both ranks."""
    _, figures, _ = report
    (found,) = figures["exposed_by_cause"]
    causes = found["causes"]
    parts_ms = [part["ms"] for part in causes["parts"].values()]
    total_ms = sum(parts_ms) + causes["nothing_left_ms"] + causes["unexplained_ms"]
    assert total_ms == pytest.approx(causes["exposed_ms"])
    assert causes["exposed_ms"] == pytest.approx(figures["exposed"]["measured_ms"], abs=0.1)
