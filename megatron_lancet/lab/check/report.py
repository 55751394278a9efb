"""The findings of a check, as a table for a terminal and as JSON."""

from collections.abc import Iterator
from typing import Any

from megatron_lancet.lab.check.check import SEEDS, Finding, Verdict
from megatron_lancet.lab.check.compare import LOSS_TOLERANCE, TOLERANCE, Comparison
from megatron_lancet.report.tables import right_aligned

_NUM_SHOWN = 8


def report(finding: Finding, seconds: float) -> str:
    """The lines for a terminal."""
    shrunk = finding.shrunk
    lines = [f"Megatron-Lancet check: {shrunk.layout.num_ranks} CPU ranks, {shrunk.layout}"]
    lines += [f"  changed: {change}" for change in shrunk.changes]
    lines += ["", "stock with this layout, compared with stock on one rank", *_table(finding.stock)]
    if finding.culprit is not None:
        lines += [f"  {line}" for line in _culprit(finding)]
    lines += _seed_lines(finding.stock_seeds)
    lines += ["", "the overlap, compared with stock with this layout"]
    lines += _table(finding.ours) if finding.ours is not None else [f"  not compared: {finding.why_not_ours}"]
    lines += _seed_lines(finding.our_seeds)
    return "\n".join([*lines, "", f"{_verdict(finding)}: {finding.num_runs} runs in {seconds:.0f} s"])


def _verdict(finding: Finding) -> str:
    if finding.verdict == Verdict.NOT_COMPARED:
        return f"{finding.verdict}: stock is equal, but the overlap did not run"
    left_out = "" if finding.with_ours else " (stock only)"
    return f"{finding.verdict}{left_out}"


def _seed_lines(seeds: tuple[int, ...]) -> Iterator[str]:
    """Yields the lines about the seeds that show a difference."""
    others = [str(seed) for seed in SEEDS if seed not in seeds]
    if seeds and others:
        yield f"  with seed {', '.join(map(str, seeds))} of the samples, not with {', '.join(others)}:"
        yield "  a fault that needs these samples, or a token routed to another expert by rounding"
    elif seeds:
        yield f"  with each seed of the samples ({', '.join(map(str, seeds))})"


def _table(comparison: Comparison) -> Iterator[str]:
    wrong = set(comparison.wrong)
    rows = [("loss", comparison.loss, LOSS_TOLERANCE), ("grad norm", comparison.grad_norm, TOLERANCE)]
    # A parameter whose ranks disagree is in both of these; each says something else.
    rows += [(name, error, TOLERANCE) for name, error in comparison.parameters.items()]
    rows += [(f"{name} (ranks disagree)", error, TOLERANCE) for name, error in comparison.disagreement.items()]
    bad = [row for row in rows[2:] if row[0] in wrong]
    shown = rows[:2] + (bad[:_NUM_SHOWN] if bad else rows[2:3])
    cells = [(f"{error:.1e}", "DIFFERS" if name in wrong else "equal", name) for name, error, _ in shown]
    for line, (_, _, name) in zip(right_aligned([cell[:2] for cell in cells]), cells, strict=True):
        yield f"  {line}  {name}"
    rest = len(bad) - _NUM_SHOWN
    if rest > 0:
        yield f"  and {rest} more parameters"
    num_equal = len(comparison.parameters) - sum(name in wrong for name in comparison.parameters)
    yield f"  {num_equal} of {len(comparison.parameters)} gradients equal, relative error at most {TOLERANCE:g}"


def _culprit(finding: Finding) -> Iterator[str]:
    assert finding.culprit is not None
    if finding.culprit.axes:
        yield "cause: the difference disappears " + ", or ".join(f"without {axis}" for axis in finding.culprit.axes)
    else:
        yield "cause: no axis alone; the difference stays whichever axis is removed"
    if finding.culprit.cleared:
        yield f"the difference stays without {', '.join(finding.culprit.cleared)}"
    if finding.culprit.refused:
        yield f"Megatron does not run without {', '.join(finding.culprit.refused)}"


def record(finding: Finding, seconds: float) -> dict[str, Any]:
    """The finding for a JSON file."""

    def numbers(comparison: Comparison | None) -> dict[str, Any] | None:
        if comparison is None:
            return None
        return {
            "differs": comparison.differs,
            "loss": comparison.loss,
            "grad_norm": comparison.grad_norm,
            "wrong": comparison.wrong,
            "parameters": comparison.parameters,
            "ranks_disagree": comparison.disagreement,
        }

    culprit = finding.culprit
    return {
        "verdict": finding.verdict,
        "differs": finding.differs,
        "num_ranks": finding.shrunk.layout.num_ranks,
        "layout": vars(finding.shrunk.layout),
        "words": finding.shrunk.words,
        "changes": finding.shrunk.changes,
        "tolerance": TOLERANCE,
        "loss_tolerance": LOSS_TOLERANCE,
        "stock": numbers(finding.stock),
        "ours": numbers(finding.ours),
        "why_not_ours": finding.why_not_ours,
        "causes": None if culprit is None else culprit.axes,
        "cleared": None if culprit is None else culprit.cleared,
        "not_run_without": None if culprit is None else culprit.refused,
        "stock_seeds": finding.stock_seeds,
        "our_seeds": finding.our_seeds,
        "num_runs": finding.num_runs,
        "seconds": round(seconds, 1),
    }
