"""Formats a timeline as text: lanes, the longest waits, and every op."""

from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

_MARKS = ((0.75, "#"), (0.25, "+"), (0.0, "."))
"""Mark of a column if more than this share of its time is busy."""


def lanes(timeline: RankTimeline, until_ms: float, width: int = 100) -> list[str]:
    """Returns one line per lane: ``#`` where a column's time is mostly busy, ``+`` partly, ``.`` a little.

    Args:
        until_ms: end of the shown time, from the beginning of the step.
    """
    lines = []
    for lane in Lane:
        busy_ms = [0.0] * width
        column_ms = until_ms / width
        for span in timeline.spans:
            if span.lane is lane and span.start_ms < until_ms:
                _add(busy_ms, span, column_ms)
        shares = [min(busy / column_ms, 1.0) for busy in busy_ms]
        marks = "".join(next((mark for least, mark in _MARKS if share > least), " ") for share in shares)
        lines.append(f"{lane:>8} |{marks}|")
    return lines


def longest_waits(timeline: RankTimeline, most: int) -> list[str]:
    """Lists the messages with the longest waits, one line each."""
    by_name: dict[str, float] = {}
    for span in timeline.spans:
        if span.lane is Lane.WAIT:
            by_name[span.name] = by_name.get(span.name, 0.0) + span.ms
    ranked = sorted(by_name.items(), key=lambda item: (-item[1], item[0]))
    return [f"{ms:10.2f} ms  {name}" for name, ms in ranked[:most]]


def all_spans(timeline: RankTimeline) -> list[str]:
    """Lists every span, one line each."""
    return [
        f"{span.start_ms:10.3f} {span.end_ms:10.3f}  {span.lane:<8} {span.name}"
        + (f"  {span.num_bytes} bytes" if span.num_bytes else "")
        for span in timeline.spans
    ]


def _add(busy_ms: list[float], span: Span, column_ms: float) -> None:
    first = min(len(busy_ms) - 1, int(span.start_ms / column_ms))
    last = min(len(busy_ms) - 1, int(span.end_ms / column_ms))
    for column in range(first, last + 1):
        start_ms, end_ms = max(span.start_ms, column * column_ms), min(span.end_ms, (column + 1) * column_ms)
        busy_ms[column] += max(0.0, end_ms - start_ms)
