"""Timelines of a step: clock alignment over ranks, HTML page, Perfetto trace and text."""
