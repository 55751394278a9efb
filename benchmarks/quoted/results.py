"""Results that documents quote: each case of a benchmark from the newest committed result file that has it.

For the network benchmark, whose cases were measured under several names, see :mod:`benchmarks.quoted.network`.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.network.summary import CaseSummary, Row
from benchmarks.prediction import cases as prediction_cases
from benchmarks.prediction.errors import CaseErrors, compare
from benchmarks.provenance import mark, source

_RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Quoted:
    """A case and the file that it comes from.

    Attributes:
        command: that measured it.
        commit: of the code; None where the file has none.
        is_dirty: whether tracked files differed from it; None where the file does not say.
        settings: of allocator and thread pools; None where the file does not say.
    """

    file: str
    date: str
    case: dict[str, Any]
    command: str = ""
    commit: str | None = None
    is_dirty: bool | None = None
    settings: dict[str, str] | None = None

    @property
    def code(self) -> str:
        """What the file says about the code that ran."""
        if self.commit is None:
            return "commit not recorded"
        changes = {True: " with uncommitted changes", False: "", None: ", uncommitted changes not recorded"}
        return f"commit {self.commit[:7]}{changes[self.is_dirty]}"

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
def all_runs(benchmark: str) -> list[Quoted]:
    """Every measurement of a case of a benchmark, the oldest first."""
    files = [(json.loads(path.read_text()), path.name) for path in _RESULTS.glob(f"{benchmark}-*.json")]
    return [
        Quoted(
            name,
            measured["date"],
            case,
            measured.get("command", ""),
            measured.get("commit"),
            measured.get("is_dirty"),
            measured.get("settings"),
        )
        for measured, name in sorted(files, key=lambda one: (one[0]["date"], one[1]))
        for case in measured["cases"]
    ]


def newest(benchmark: str) -> dict[str, Quoted]:
    """The newest measurement of each case of a benchmark, by name."""
    return {quoted.case["name"]: quoted for quoted in all_runs(benchmark)}


def predictions(names: Collection[str] = prediction_cases.PLAIN.cases) -> list[tuple[Quoted, CaseErrors]]:
    """The newest measurement of each of these cases of the prediction benchmark, in the order of the cases."""
    found = newest("prediction")
    return [(found[name], compare(found[name].case)) for name in prediction_cases.CASES if name in {*names} & {*found}]


def rows_of(summary: CaseSummary) -> dict[str, Row]:
    """A case's variants by name."""
    return {row.name: row for row in summary.rows}
