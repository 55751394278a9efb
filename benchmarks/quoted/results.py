"""Results that documents quote: each case of a benchmark from the newest committed result file with that case.

Cases of the network benchmark have had several names; for these, see :mod:`benchmarks.quoted.network`.
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
    """A case and its file.

    Attributes:
        command: the command that measured it.
        commit: commit of the code; None if not recorded.
        is_dirty: whether tracked files differed from the commit; None if not recorded.
        settings: settings of allocator and thread pools; None if not recorded.
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
        """The recorded version of the code."""
        if self.commit is None:
            return "commit not recorded"
        changes = {True: " with uncommitted changes", False: "", None: ", uncommitted changes not recorded"}
        return f"commit {self.commit[:7]}{changes[self.is_dirty]}"

    @property
    def path(self) -> Path:
        """Path of the file."""
        return _RESULTS / self.file

    @property
    def mark(self) -> str:
        """Marks of a result without a traceable commit, and of disturbed figures."""
        found = (
            [self.case["disturbance"]]
            if "disturbance" in self.case
            else [s["disturbance"] for s in self.case["sweeps"]]
        )
        return mark(self.path, any(one["is_disturbed"] for one in found))


@cache
def result(name: str) -> dict[str, Any]:
    """Returns the newest result named ``name`` plus a date."""
    path = newest_file(name)
    return {"file": path.name, **json.loads(path.read_text())}


def sourced(table: str, name: str) -> str:
    """Returns the table with a sentence after it that names its source, the newest result named ``name``."""
    return f"{table}\n\n{source(newest_file(name))}"


def newest_file(name: str) -> Path:
    """Returns the newest result file named ``name`` plus a date."""
    return _files(name)[-1]


def has_result(name: str) -> bool:
    """Returns whether a result named ``name`` is committed."""
    return bool(_files(name))


def _files(name: str) -> list[Path]:
    return sorted(_RESULTS.glob(f"{name}-[0-9][0-9][0-9][0-9]-*.json"))


@cache
def all_runs(benchmark: str) -> list[Quoted]:
    """Returns all measured cases of a benchmark, oldest first."""
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
        for measured, name in sorted(files, key=lambda one: (one[0]["date"], one[0].get("time", ""), one[1]))
        for case in measured["cases"]
    ]


def newest(benchmark: str) -> dict[str, Quoted]:
    """Returns the newest measurement of each case of a benchmark, by name."""
    return {quoted.case["name"]: quoted for quoted in all_runs(benchmark)}


def predictions(names: Collection[str] = prediction_cases.PLAIN.cases) -> list[tuple[Quoted, CaseErrors]]:
    """Returns the newest measurement of each of these prediction cases, in the order of the cases."""
    found = newest("prediction")
    return [(found[name], compare(found[name].case)) for name in prediction_cases.CASES if name in {*names} & {*found}]


def rows_of(summary: CaseSummary) -> dict[str, Row]:
    """Returns a case's variants by name."""
    return {row.name: row for row in summary.rows}
