"""The views of a run and of its traced step among the files of ``--lancet-report``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lancet.feature import ActiveFeature, Feature
from megatron_lancet.lab.views.html import TIMELINE_PAGE
from megatron_lancet.lab.views.run_page import RUN_PAGE, write_run_page
from megatron_lancet.lab.views.trace_file import TRACE_FILE
from megatron_lancet.lab.views.views import write_views
from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.training.run import OverlappedRun, Run


class Views(Feature):
    """``run.html``, ``timeline.html`` and ``trace.json``."""

    name = "views"
    report_files = (RUN_PAGE, TIMELINE_PAGE, TRACE_FILE)

    def start(self, run: Run) -> "ActiveViews | None":
        """Joins every run of the overlapping block."""
        return ActiveViews() if isinstance(run, OverlappedRun) else None


class ActiveViews(ActiveFeature):
    """Writes the views at the end of a run."""

    def write(self, folder: Path, steps: TimelineRecord | None, report: Mapping[str, Any]) -> Sequence[Path]:
        """Writes the page over the run, and the views of a step if one was traced."""
        over_run = [write_run_page(report, folder)] if report else []
        return over_run if steps is None else [*over_run, *write_views(steps, folder)]


VIEWS = Views()
