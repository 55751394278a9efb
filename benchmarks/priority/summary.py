"""From raw samples to the table: medians, paired ratios, bytes. Plain Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from benchmarks.harness.samples import (
    CaseSamples,
    Spread,
    all_exposed,
    disturbance_warning,
    disturbed_sweeps,
    slower,
    spread,
)
from benchmarks.harness.tables import aligned, markdown
from benchmarks.priority.cases import BASELINE, FREE, NO_PRIORITY, OVERLAPPED

_HEADINGS = (
    "variant",
    "step ms",
    "forward",
    "backward",
    "reduce",
    "optimizer",
    "exposed",
    "MB on the wire",
    f"against {OVERLAPPED}",
    f"against {NO_PRIORITY}",
)


@dataclass(frozen=True)
class Row:
    """One variant in one case; medians over all sweeps.

    Attributes:
        step_ms: of the slower rank, like all parts of it.
        reduce_ms: what is left of the gradient reduction behind the backward pass.
        exposed_ms: time blocked in waits for rows and token counts, mean of the ranks.
        wire_bytes: that left a rank's shaped interface in a step, the larger one.
        over_overlapped: paired ratios of the step of Megatron's overlap-grad-reduce to this one's.
        over_no_priority: the same for the step of our plan without priority.
    """

    name: str
    step_ms: float
    forward_ms: float
    backward_ms: float
    reduce_ms: float
    optimizer_ms: float
    exposed_ms: float
    wire_bytes: float
    over_overlapped: Spread | None
    over_no_priority: Spread | None


@dataclass(frozen=True)
class CaseSummary:
    """One case.

    Attributes:
        exposed_share: of the baseline's passes, waited for rows and counts.
        comm_share: of the baseline's whole step, waited for them and for the reduction.
        grad_share: share of dense gradients in the bytes that a rank sends.
        compute_ms: CPU time of the baseline's step with rows on the free link, slower rank.
        link_ms: time that all bytes of a rank take at the link's rate.
        disturbed: numbers of the sweeps that something disturbed, from 1.
    """

    name: str
    title: str
    rate_bps: float
    exposed_share: float
    comm_share: float
    grad_share: float
    compute_ms: float
    link_ms: float
    disturbed: list[int]
    rows: list[Row]


def summarise(case: Mapping[str, Any]) -> CaseSummary:
    """The table's figures of a case of the JSON file."""
    samples = CaseSamples(case)

    def base(field: str) -> float:
        return samples.median(BASELINE, slower(field))

    exposed_ms = samples.median(BASELINE, all_exposed)
    sent, reduced = base("payload_bytes"), base("reduced_bytes")
    return CaseSummary(
        name=case["name"],
        title=case["title"],
        rate_bps=case["rate_bps"],
        exposed_share=exposed_ms / (base("forward_ms") + base("backward_ms")),
        comm_share=(exposed_ms + base("reduce_ms")) / base("step_ms"),
        grad_share=reduced / (sent + reduced),
        compute_ms=samples.median(FREE, slower("cpu_ms")),
        link_ms=(sent + reduced) * 8 / case["rate_bps"] * 1e3,
        disturbed=disturbed_sweeps(case),
        rows=[_row(samples, name, case["variants"]) for name in case["variants"] if name != FREE],
    )


def _row(samples: CaseSamples, name: str, variants: Sequence[str]) -> Row:
    def ratios(reference: str) -> Spread | None:
        if reference not in variants or name == reference:
            return None
        return spread([ratio for sweep in samples.speedups(name, reference) for ratio in sweep])

    parts = {
        field: samples.median(name, slower(field))
        for field in ("step_ms", "forward_ms", "backward_ms", "reduce_ms", "optimizer_ms", "wire_bytes")
    }
    return Row(
        name=name,
        exposed_ms=samples.median(name, all_exposed),
        over_overlapped=ratios(OVERLAPPED),
        over_no_priority=ratios(NO_PRIORITY),
        **parts,
    )


def description(case: CaseSummary) -> str:
    """What the figures of a case refer to, and whether they are to be trusted."""
    text = (
        f"{case.title}: {case.rate_bps / 1e6:.0f} Mbit/s; measured {case.exposed_share:.1%}, with the reduction "
        f"{case.comm_share:.1%} of the whole step. Gradients are {case.grad_share:.1%} of the bytes. A step takes at "
        f"least {max(case.compute_ms, case.link_ms):.0f} ms: compute {case.compute_ms:.0f}, link {case.link_ms:.0f}"
    )
    if case.disturbed:
        text += f". {disturbance_warning(case.disturbed)}"
    return text


def _ratio(found: Spread | None) -> str:
    return "" if found is None else f"{found.median:.3f} ({found.low:.2f}-{found.high:.2f})"


def table(case: CaseSummary) -> list[list[str]]:
    """Headings and a line for each variant."""
    lines = [
        [
            row.name,
            *(f"{value:.0f}" for value in (row.step_ms, row.forward_ms, row.backward_ms)),
            *(f"{value:.0f}" for value in (row.reduce_ms, row.optimizer_ms, row.exposed_ms)),
            f"{row.wire_bytes / 1e6:.2f}",
            _ratio(row.over_overlapped),
            _ratio(row.over_no_priority),
        ]
        for row in case.rows
    ]
    return [list(_HEADINGS), *lines]


def as_text(cases: Sequence[CaseSummary]) -> str:
    """Aligned columns."""
    return "\n\n".join(f"{description(case)}\n{indent(aligned(table(case)), '  ')}" for case in cases)


def as_markdown(cases: Sequence[CaseSummary]) -> str:
    """A heading, a paragraph and a table for each case."""
    blocks = [f"### {case.name}\n\n{description(case)}.\n\n{markdown(table(case))}" for case in cases]
    return "\n\n".join(blocks) + "\n"
