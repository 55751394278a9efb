"""Timelines of a step: clocks aligned over ranks, HTML page, Perfetto trace and text."""
