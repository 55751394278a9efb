"""The report at the end of a run, and the files of ``--lancet-report``."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megatron_lancet.feature import ActiveFeature, Steering
from megatron_lancet.files.reader import RecordError
from megatron_lancet.files.report_folder import PLAN_FILE, PROFILE_FILE
from megatron_lancet.plan_words import plan_text
from megatron_lancet.planning.explain import explain
from megatron_lancet.planning.plan_file import PlanFile, write_plan_file
from megatron_lancet.planning.plan_record import record_of
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.simulator import simulate
from megatron_lancet.profiler.cache import write
from megatron_lancet.report.exposed import ExposedTable, exposed_table
from megatron_lancet.report.summary import about
from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.schedule.plan import Plan, plan_without_overlap
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.observe.step_stats import NUM_WARM_UP_STEPS
from megatron_lancet.training.observe.traced_steps import TracedSteps
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.process.console import say


def report_overlap(
    recorder: StepRecorder,
    setup: OverlapSetup,
    folder: Path | None,
    traced: TracedSteps | None = None,
    steering: Steering | None = None,
    features: Sequence[ActiveFeature] = (),
) -> None:
    """Report a run that overlaps. Collective over all ranks; rank 0 prints and writes.

    Args:
        folder: folder for the files; None writes no files.
        traced: the traced steps; None if no step was traced.
        steering: has found the plan, with a profile; None if the plan was given.
        features: the run's features, with keys, lines and files of their own.
    """
    profile = steering.profile if steering is not None else None
    shown = setup.plan if traced is None else traced.plan or plan_without_overlap()
    timelines = traced.gather(plan_text(shown)) if traced is not None else None
    table: ExposedTable | None = None
    if timelines is not None:
        timelines = _with_prediction(timelines, shown, profile)
        parts = timelines.measured, timelines.predicted, timelines.before, timelines.reasons
        table = exposed_table(*parts, step=timelines.step)
    report = recorder.report(setup.plan, folder, steering, table)
    if folder is not None and dist.get_rank() == 0:
        for path in _write(folder, setup.plan, profile):
            say(f"                     {path}")
        if timelines is not None and report:
            compared = steering.compared if steering is not None else None
            timelines = replace(timelines, about=about(report["run"]), compared=compared)
        for feature in features:
            for path in feature.write(folder, timelines, report):
                say(f"                     {path}")
    if traced is not None and traced.plan != setup.plan:
        say(f"Megatron-Lancet report: {_why_not_final(timelines, traced.plan)}")


def _why_not_final(timelines: TimelineRecord | None, plan: Plan | None) -> str:
    """Why a run has no timeline of a step under its last plan.

    Args:
        plan: the plan of the traced step; None for no overlap.
    """
    if timelines is None:
        return f"no timeline: a traced step needs a confirmed plan, and {NUM_WARM_UP_STEPS} steps before it"
    if plan is not None:
        return (
            "the run ended before a traced step under its last plan: the timeline and the table are of an earlier one, "
            f"{plan_text(plan)}, and {PLAN_FILE} is the plan of the last step"
        )
    return (
        "the run ended before a step under its final plan: the timeline and the table are of a step without overlap, "
        f"and {PLAN_FILE} is the plan of the last step"
    )


def _with_prediction(record: TimelineRecord, plan: Plan, profile: Profile | None) -> TimelineRecord:
    """Adds the predicted step, if there is a profile."""
    if profile is None:
        return record
    try:
        # With several pipeline stages a simulation shows the slowest one only.
        predicted = () if max(profile.model.stage_of_layer) else simulate(profile, plan).timelines
        layers = explain(profile, plan).layers
    except RecordError:  # the profile does not cover this fixed plan: there is no prediction to show
        return record
    reasons = {message.op: message.reason.description for layer in layers for message in layer.exposed}
    return replace(record, predicted=predicted, reasons=reasons)


def _write(folder: Path, plan: Plan, profile: Profile | None) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    content = PlanFile(plan)
    if profile is not None:
        written.append(write(folder / PROFILE_FILE, profile))
        with suppress(RecordError):  # as above
            content = record_of(profile, plan)
    write_plan_file(folder / PLAN_FILE, content)
    return [*written, folder / PLAN_FILE]
