"""The views of a traced step among the files of ``--lancet-report``."""

from collections.abc import Sequence
from pathlib import Path

from megatron_lancet.feature import ActiveFeature, Feature
from megatron_lancet.lab.views.html import TIMELINE_PAGE
from megatron_lancet.lab.views.trace_file import TRACE_FILE
from megatron_lancet.lab.views.views import write_views
from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.training.run import OverlappedRun, Run


class Views(Feature):
    """``timeline.html`` and ``trace.json``."""

    name = "views"
    report_files = (TIMELINE_PAGE, TRACE_FILE)

    def start(self, run: Run) -> "ActiveViews | None":
        """Joins every run of the overlapping block."""
        return ActiveViews() if isinstance(run, OverlappedRun) else None


class ActiveViews(ActiveFeature):
    """Writes the views at the end of a run."""

    def write(self, folder: Path, steps: TimelineRecord | None) -> Sequence[Path]:
        """Writes both files, if a step was traced."""
        return () if steps is None else write_views(steps, folder)


VIEWS = Views()
