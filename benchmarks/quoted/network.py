"""Network benchmark results that documents quote, matched by configuration and not by case name.

Runs of a case match in shape, exposed share, optimizer, baseline and ranks; runs of a variant match in name and
schedule. For each variant, documents quote the newest committed run of the case. If several runs have the variant,
they also quote the range. Disturbed runs count, and keep their mark.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.harness.cases import Case, Shape
from benchmarks.harness.tables import markdown
from benchmarks.network.cases import (
    CASES,
    DISPATCH_CASES,
    LOAD_CASES,
    NODES_CASES,
    PAIRED_CASES,
    TILED_CASES,
    VARIANTS,
    WIRED_CASES,
)
from benchmarks.network.summary import CaseSummary, Row, summarise
from benchmarks.provenance import DISTURBED, link, together
from benchmarks.quoted.results import Quoted, all_runs, rows_of
from megatron_lancet.files.reader import from_plain

FOLDER = "results"
"""Path from benchmarks/RESULTS.md to the result files."""
_KEEPS_MEMORY = "MALLOC_TRIM_THRESHOLD_"


@dataclass(frozen=True)
class _Identity:
    """Properties that match in comparable runs."""

    shape: Shape
    exposed_share: float | None
    optimizer: bool
    baseline: str
    ranks_per_node: int


def _identity(case: Mapping[str, Any]) -> _Identity:
    """Returns a case's identity; fields that older files lack get the values of that time."""
    shape = from_plain(Shape, case["shape"], f"case {case['name']}")
    return _Identity(shape, case["exposed_share"], case["optimizer"], case["baseline"], case.get("ranks_per_node", 1))


def _identity_of(case: Case) -> _Identity:
    return _Identity(case.shape, case.exposed_share, case.optimizer, case.baseline, case.ranks_per_node)


@dataclass(frozen=True)
class Run:
    """One run of a case.

    Attributes:
        rows: its variants by name, except variants whose schedule has changed since.
    """

    quoted: Quoted
    summary: CaseSummary
    rows: Mapping[str, Row]


@dataclass(frozen=True)
class Measured:
    """All comparable runs of a case, newest first."""

    runs: Sequence[Run]

    def rows(self, name: str) -> list[Row]:
        """Returns a variant's rows, newest first."""
        return [run.rows[name] for run in self.runs if name in run.rows]

    def row(self, name: str) -> Row | None:
        """Returns a variant's newest row."""
        return next(iter(self.rows(name)), None)

    def mark(self, name: str) -> str:
        """Returns the marks of a variant's newest run, and DISTURBED if any of its runs was disturbed."""
        marks = [run.quoted.mark for run in self.runs if name in run.rows]
        return together(marks[:1] + [DISTURBED for mark in marks if DISTURBED in mark])

    def cell(self, name: str, costs: str) -> str:
        """Returns a variant's newest speed-up, and the range of all its runs.

        Args:
            costs: text in parentheses after the speed-up.
        """
        speedups = [row.speedup.median for row in self.rows(name)]
        low, high = (f"{pick(speedups):.2f}" for pick in (min, max))
        spread = f", {low if low == high else f'{low} to {high}'} in {len(speedups)} runs" if len(speedups) > 1 else ""
        return f"{speedups[0]:.2f} ({costs}){spread}{self.mark(name)}"


@cache
def _runs() -> list[tuple[_Identity, Run]]:
    """Returns all comparable runs, newest first."""
    found = []
    for quoted in reversed(all_runs("network")):
        is_default = quoted.settings is None or _KEEPS_MEMORY in quoted.settings
        if not is_default or " --rate" in quoted.command:  # another allocator, or no target for the rate
            continue
        summary = summarise(quoted.case)
        plans = quoted.case["plans"]
        rows = {name: row for name, row in rows_of(summary).items() if plans[name] == VARIANTS[name].schedule}
        found.append((_identity(quoted.case), Run(quoted, summary, rows)))
    return found


def measured(names: Collection[str]) -> dict[str, Measured]:
    """Returns the runs of these cases, in the order of :data:`CASES`; omits cases that no file has."""
    found = {}
    for name in CASES:
        runs = [run for identity, run in _runs() if identity == _identity_of(CASES[name])]
        if name in names and runs:
            found[name] = Measured(runs)
    return found


def network() -> dict[str, Measured]:
    """Returns the runs of each network case, except the cases of the functions below."""
    others = {*PAIRED_CASES, *DISPATCH_CASES, *NODES_CASES, *LOAD_CASES, *TILED_CASES, *WIRED_CASES}
    return measured([name for name in CASES if name not in others])


def network_with_dedup() -> dict[str, tuple[Quoted, CaseSummary]]:
    """Returns the newest run of each case with one copy of a token per rank, under its current name."""
    return _newest_of(DISPATCH_CASES)


def network_of_nodes() -> dict[str, tuple[Quoted, CaseSummary]]:
    """Returns the same for cases with one copy of a token per node."""
    return _newest_of(NODES_CASES)


def network_of_load() -> dict[str, tuple[Quoted, CaseSummary]]:
    """Returns the same for cases with uneven load, which placed experts balance."""
    return _newest_of(LOAD_CASES)


def network_of_tiles() -> dict[str, tuple[Quoted, CaseSummary]]:
    """Returns the same for cases that send rows in tiles."""
    return _newest_of(TILED_CASES)


def _newest_of(names: Collection[str]) -> dict[str, tuple[Quoted, CaseSummary]]:
    found = {}
    for name, case in measured(names).items():
        own = [run for run in case.runs if run.quoted.case["name"] == name]
        if own:
            found[name] = own[0].quoted, own[0].summary
    return found


def dates(case: Measured, folder: str = FOLDER) -> str:
    """Returns the runs of a case as links to their files.

    Args:
        folder: path from the document to the files.
    """
    return ", ".join(link(run.quoted.date, run.quoted.path, folder) for run in case.runs)


def with_sources(lines: Sequence[Sequence[str]], cases: Collection[Measured]) -> str:
    """Returns a table and its source files and commands."""
    sources = {run.quoted.file: run.quoted for case in cases for run in case.runs}
    listed = [
        f"{link(file, quoted.path, FOLDER)}, {quoted.date}, {quoted.code}: `{quoted.command}`"
        for file, quoted in sorted(sources.items())
    ]
    return f"{markdown(lines)}\n\nMade from {'; '.join(listed)}."


def has_step(case: Mapping[str, Any]) -> str:
    """Describes a step of a case in a result file."""
    passes = "forward, backward"
    return f"{passes}, gradient reduction and Adam" if case["optimizer"] else passes.replace(",", " and")
