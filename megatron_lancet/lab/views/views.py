"""Writes the page and the trace of one step."""

from dataclasses import replace
from pathlib import Path

from megatron_lancet.lab.views.clocks import aligned
from megatron_lancet.lab.views.html import TIMELINE_PAGE, write_page
from megatron_lancet.lab.views.trace_file import TRACE_FILE, write_trace
from megatron_lancet.report.timeline_record import TimelineRecord


def write_views(record: TimelineRecord, folder: Path) -> tuple[Path, Path]:
    """Writes ``timeline.html`` and ``trace.json`` with aligned clocks into ``folder``, which it creates."""
    folder.mkdir(parents=True, exist_ok=True)
    one_clock = replace(record, measured=aligned(record.measured, record.ep_groups, record.ranks_per_node))
    page, trace = folder / TIMELINE_PAGE, folder / TRACE_FILE
    write_page(one_clock, page)
    write_trace(one_clock, trace)
    return page, trace
