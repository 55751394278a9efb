"""What a reader opens: a page and a trace of one step."""

from dataclasses import replace
from pathlib import Path

from megatron_lancet.report.timeline.clocks import aligned
from megatron_lancet.report.timeline.html import TIMELINE_PAGE, write_page
from megatron_lancet.report.timeline.record import TimelineRecord
from megatron_lancet.report.timeline.trace_file import TRACE_FILE, write_trace


def write_views(record: TimelineRecord, folder: Path) -> tuple[Path, Path]:
    """Write ``timeline.html`` and ``trace.json`` into ``folder``, made if missing.

    Args:
        record: each rank on its own clock; they are aligned here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    one_clock = replace(record, measured=aligned(record.measured, record.ep_groups))
    page, trace = folder / TIMELINE_PAGE, folder / TRACE_FILE
    write_page(one_clock, page)
    write_trace(one_clock, trace)
    return page, trace
