"""The comparison as text for a terminal and as markdown."""

from collections.abc import Sequence

from benchmarks.from_trace.summary import SMALL_MS, WANTED, CaseSummary, Pair, median_difference
from benchmarks.harness.tables import aligned, markdown

_PAIRS = ("", "our profiler, ms", "from traces, ms", "difference")
_STEPS = ("configuration", "measured ms (quartiles)", "from our profile", "error", "from traces", "error")


def _pair(one: Pair) -> list[str]:
    return [
        one.name,
        f"{one.own_ms:.2f}",
        f"{one.trace_ms:.2f}",
        f"{one.difference:+.1%}{'' if one.is_equal else ' !'}",
    ]


def _steps(case: CaseSummary) -> list[list[str]]:
    lines = [
        [
            one.name,
            f"{one.measured_ms:.0f} ({one.low_ms:.0f}-{one.high_ms:.0f})",
            f"{one.own_ms:.0f}",
            f"{one.own_error:+.1%}",
            f"{one.trace_ms:.0f}",
            f"{one.trace_error:+.1%}",
        ]
        for one in case.predicted
    ]
    return [list(_STEPS), *lines]


def _pairs(pairs: Sequence[Pair]) -> list[list[str]]:
    return [list(_PAIRS), *map(_pair, pairs)]


def _description(case: CaseSummary) -> str:
    disturbed = " DISTURBED: other work took the processor or memory; quote these figures only with this mark."
    near = sum(pair.is_equal for pair in case.whole)
    return (
        f"{case.title}: {case.rate_bps / 1e6:.0f} Mbit/s, {case.num_repeats} repeats; stock's step {case.stock_ms:.0f} "
        f"ms without a profiler. Of {len(case.whole)} ops of unchunked micro-batches {near} are within {WANTED:.0%} or "
        f"{SMALL_MS} ms of our profiler's (median difference {median_difference(case.whole):.1%}; all compute of a "
        f"step {case.total.difference:+.1%}). Chunks, which a stock run does not have, are estimated: median "
        f"difference {median_difference(case.chunks):.1%}.{disturbed if case.is_disturbed else ''}"
    )


def as_text(cases: Sequence[CaseSummary]) -> str:
    """Aligned columns."""
    return "\n\n".join(
        f"{case.name}: {_description(case)}\n\n{aligned(_steps(case))}\n\n{aligned(_pairs([*case.whole, case.total]))}"
        f"\n\n{aligned(_pairs(case.messages))}"
        for case in cases
    )


def as_markdown(cases: Sequence[CaseSummary]) -> str:
    """For each case a heading, a paragraph and tables."""
    blocks = []
    for case in cases:
        tables = [_steps(case), _pairs([*case.whole, case.total]), _pairs(case.messages), _pairs(case.chunks)]
        blocks.append("\n\n".join([f"### {case.name}", _description(case), *map(markdown, tables)]))
    return "\n\n".join(blocks) + "\n"
