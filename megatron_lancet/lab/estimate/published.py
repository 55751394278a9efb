"""Public speed-ups against predicted ones. The runs, their conditions and sources are in ``published.json``.

No constant is chosen for a run: all come from ``devices.py`` and ``layer_parts.py``.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lancet.lab.estimate.candidates import STOCK, Candidate
from megatron_lancet.lab.estimate.cluster_text import ClusterChoice
from megatron_lancet.lab.estimate.command import speeds_of
from megatron_lancet.lab.estimate.estimate import Estimate, Estimator
from megatron_lancet.lab.estimate.script import allowed_of, run_of
from megatron_lancet.lab.launch.launch import Launch
from megatron_lancet.lab.what_if.forecast import Routing
from megatron_lancet.report.tables import right_aligned
from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.plan import DwPolicy, OverlapRange, Plan, fixed_plan, paired

_FILE = Path(__file__).parent / "published.json"
_MS_PER_S = 1e3


@dataclass(frozen=True)
class PublishedRun:
    """A public comparison of a run with and without overlap.

    Attributes:
        cluster: as ``--cluster`` has it.
        flags: Megatron's arguments of a run of that size.
        plan: what its overlap does, by name.
        repeats_messages: whether its recompute sends the messages of the forward again.
        step_s: seconds of a step without overlap.
        hidden: part of the messages' time beside compute with overlap, as published; None if it is not.
        assumed: conditions that are not published.
    """

    name: str
    source: str
    cluster: str
    flags: tuple[str, ...]
    plan: str
    repeats_messages: bool
    step_s: float
    speedup: float
    hidden: float | None
    assumed: str


@dataclass(frozen=True)
class Compared:
    """A public run, and what is predicted for it: without overlap, and with the overlap that it has."""

    published: PublishedRun
    before: Estimate
    after: Estimate

    @property
    def hidden(self) -> tuple[float, float]:
        """Lowest and highest part of the exposed time that the overlap hides."""
        ends = zip(self.before.figures, self.after.figures, strict=True)
        parts = [1 - after.exposed_ms / before.exposed_ms for before, after in ends]
        return min(parts), max(parts)

    @property
    def verdict(self) -> str:
        """Where the published speed-up lies."""
        low, high = self.after.speedup(self.before)
        if low <= self.published.speedup <= high:
            return "inside"
        return "above" if self.published.speedup > high else "below"


def published_runs() -> list[PublishedRun]:
    """The runs of the file."""
    content: Mapping[str, Any] = json.loads(_FILE.read_text())
    return [
        PublishedRun(
            name=one["name"],
            source=one["source"],
            cluster=one["cluster"],
            flags=tuple(f"{content['models'][one['model']]} {one['args']} {content['common']}".split()),
            plan=one["plan"],
            repeats_messages=one.get("repeats_messages", False),
            step_s=one["step_s"],
            speedup=one["speedup"],
            hidden=one.get("hidden"),
            assumed=one["assumed"],
        )
        for one in content["runs"]
    ]


def plan_like(name: str, dispatch: Dispatch) -> Plan:
    """The plan that does what an overlap of others does: none of them defers weight gradients."""
    plans = {
        "pairs": lambda: paired(fixed_plan(1, DwPolicy.NONE, dispatch=dispatch)),
        "two chunks": lambda: fixed_plan(2, DwPolicy.NONE, dispatch=dispatch),
        "two chunks of experts": lambda: fixed_plan(
            2, DwPolicy.NONE, overlap_range=OverlapRange.EXPERTS, dispatch=dispatch
        ),
    }
    return plans[name]()


def compare(published: PublishedRun) -> Compared:
    """Predicts a public run, with even routing."""
    cluster = ClusterChoice.parse(published.cluster)
    run = run_of(Launch(list(published.flags), None, {}), cluster, Routing("even"))
    estimator = Estimator(run, speeds_of(run, cluster))
    dispatch = allowed_of(run).stocks_dispatch
    before = Candidate(STOCK, fixed_plan(1, DwPolicy.NONE, dispatch=dispatch))
    after = Candidate(published.plan, plan_like(published.plan, dispatch))
    return Compared(published, estimator.estimate(before), estimator.estimate(after, published.repeats_messages))


def compared() -> str:
    """Compares all runs; returns a table, and what was assumed."""
    return "\n".join(lines_of([compare(one) for one in published_runs()]))


def lines_of(found: list[Compared]) -> Iterator[str]:
    """Yields the lines of a comparison."""
    rows = [["run", "step s", "predicted s", "speed-up", "predicted", "published is", "exposed before"]]
    for one in found:
        low, high = (ms / _MS_PER_S for ms in one.before.range_of("step_ms"))
        least, most = one.after.speedup(one.before)
        shares = [100 * share for share in one.before.range_of("exposed_share")]
        rows.append(
            [
                one.published.name,
                f"{one.published.step_s:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{one.published.speedup:.2f}",
                f"{least:.2f} to {most:.2f}",
                one.verdict,
                f"{shares[0]:.0f} to {shares[1]:.0f} %",
            ]
        )
    width = max(len(row[0]) for row in rows)
    yield from right_aligned([[row[0].ljust(width), *row[1:]] for row in rows])
    for one in found:
        yield ""
        yield f"{one.published.name}: {one.published.source}"
        yield f"  {one.published.cluster}; assumed: {one.published.assumed}"
        yield from _misses(one)


def _misses(one: Compared) -> Iterator[str]:
    """Says where a prediction misses, and what that points to."""
    low, high = (ms / _MS_PER_S for ms in one.before.range_of("step_ms"))
    ratio = one.published.step_s / high
    if ratio > 1:
        unknown = "what takes the rest is not modelled"
        yield f"  without overlap the published step is {ratio:.1f} times the slowest prediction: {unknown}"
        if one.verdict == "inside":
            yield "  so the speed-up is inside by chance"
    elif one.published.step_s < low:
        yield f"  without overlap the published step is {one.published.step_s / low:.2f} of the fastest prediction"
    least, most = one.hidden
    published = "" if one.published.hidden is None else f", published {100 * one.published.hidden:.0f} %"
    yield f"  of the messages the overlap hides {100 * least:.0f} to {100 * most:.0f} % as predicted{published}"
    if one.verdict == "below":
        yield "  the overlap brings less than a plan of its kind could"
    elif one.verdict == "above":
        yield "  the overlap brings more than a plan of its kind could: it changes more, or messages are slower there"
