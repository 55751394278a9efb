"""Results that documents quote: each case of a benchmark from the newest committed result file that has it.

Cases with several micro-batches, which pairs need, those with duplicates to save, those of two nodes, and those of
uneven load are kept apart from the others.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.network.cases import CASES, DISPATCH_CASES, LOAD_CASES, NODES_CASES, PAIRED_CASES, TILED_CASES
from benchmarks.network.summary import CaseSummary, Row, summarise
from benchmarks.prediction import cases as prediction_cases
from benchmarks.prediction.errors import CaseErrors, compare
from benchmarks.provenance import mark, source

_RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Quoted:
    """A case and the file that it comes from."""

    file: str
    date: str
    case: dict[str, Any]

    @property
    def path(self) -> Path:
        """Of the file."""
        return _RESULTS / self.file

    @property
    def mark(self) -> str:
        """Of a result that can't be traced to a commit, and of disturbed figures."""
        found = (
            [self.case["disturbance"]]
            if "disturbance" in self.case
            else [s["disturbance"] for s in self.case["sweeps"]]
        )
        return mark(self.path, any(one["is_disturbed"] for one in found))


@cache
def result(name: str) -> dict[str, Any]:
    """The newest result whose file is called so, followed by a date."""
    path = newest_file(name)
    return {"file": path.name, **json.loads(path.read_text())}


def sourced(table: str, name: str) -> str:
    """The table that is made of the newest result of that name, with a sentence behind it that names the file."""
    return f"{table}\n\n{source(newest_file(name))}"


def newest_file(name: str) -> Path:
    """The newest result file that is called so, followed by a date."""
    return _files(name)[-1]


def has_result(name: str) -> bool:
    """Whether such a file is committed."""
    return bool(_files(name))


def _files(name: str) -> list[Path]:
    return sorted(_RESULTS.glob(f"{name}-[0-9][0-9][0-9][0-9]-*.json"))


@cache
def newest(benchmark: str) -> dict[str, Quoted]:
    """The newest measurement of each case of a benchmark, by name."""
    found = {}
    for measured, name in sorted(
        ((json.loads(path.read_text()), path.name) for path in _RESULTS.glob(f"{benchmark}-*.json")),
        key=lambda one: (one[0]["date"], one[1]),
    ):
        for case in measured["cases"]:
            found[case["name"]] = Quoted(name, measured["date"], case)
    return found


@cache
def _summaries() -> dict[str, tuple[Quoted, CaseSummary]]:
    found = newest("network")
    return {name: (found[name], summarise(found[name].case)) for name in CASES if name in found}


def network() -> dict[str, tuple[Quoted, CaseSummary]]:
    """The newest measurement of each case of the network benchmark, in their order, but of those that follow."""
    others = {*PAIRED_CASES, *DISPATCH_CASES, *NODES_CASES, *LOAD_CASES, *TILED_CASES}
    return _network_of([name for name in CASES if name not in others])


def network_with_pairs() -> dict[str, tuple[Quoted, CaseSummary]]:
    """The same of those with pairs."""
    return _network_of(PAIRED_CASES)


def network_with_dedup() -> dict[str, tuple[Quoted, CaseSummary]]:
    """The same of those in which a token may travel once to a rank."""
    return _network_of(DISPATCH_CASES)


def network_of_nodes() -> dict[str, tuple[Quoted, CaseSummary]]:
    """The same of those in which a token may travel once to a node."""
    return _network_of(NODES_CASES)


def network_of_load() -> dict[str, tuple[Quoted, CaseSummary]]:
    """The same of those with uneven load, which placed experts even out."""
    return _network_of(LOAD_CASES)


def network_of_tiles() -> dict[str, tuple[Quoted, CaseSummary]]:
    """The same of those in which rows go to the other rank in tiles."""
    return _network_of(TILED_CASES)


def _network_of(names: Collection[str]) -> dict[str, tuple[Quoted, CaseSummary]]:
    return {name: found for name, found in _summaries().items() if name in names}


def predictions(names: Collection[str] = prediction_cases.PLAIN.cases) -> list[tuple[Quoted, CaseErrors]]:
    """The newest measurement of each of these cases of the prediction benchmark, in the order of the cases."""
    found = newest("prediction")
    return [(found[name], compare(found[name].case)) for name in prediction_cases.CASES if name in {*names} & {*found}]


def rows_of(summary: CaseSummary) -> dict[str, Row]:
    """A case's variants by name."""
    return {row.name: row for row in summary.rows}
