"""Regenerates the tables next to a result's samples from the samples, with the current code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.auto import summary as auto_summary
from benchmarks.bins import summary as bins_summary
from benchmarks.bridge import summary as bridge_summary
from benchmarks.causes import summary as causes_summary
from benchmarks.evaluation import summary as evaluation_summary
from benchmarks.from_trace import summary as from_trace_summary
from benchmarks.from_trace import table as from_trace_table
from benchmarks.gpu.check import summary as check_summary
from benchmarks.harness.tables import document
from benchmarks.network import summary as network_summary
from benchmarks.network import table as network_table
from benchmarks.prediction import errors as prediction_errors
from benchmarks.prediction import table as prediction_table
from benchmarks.priority import summary as priority_summary

RESULTS = Path(__file__).parents[1] / "results"
MAKERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "auto": (auto_summary.summarise, auto_summary.as_markdown),
    "bridge": (bridge_summary.summarise, bridge_summary.as_markdown),
    "network": (network_summary.summarise, network_table.as_markdown),
    "prediction": (prediction_errors.compare, prediction_table.as_markdown),
    "priority": (priority_summary.summarise, priority_summary.as_markdown),
    "causes": (causes_summary.summarise, causes_summary.as_markdown),
    "evaluation": (evaluation_summary.summarise, evaluation_summary.as_markdown),
    "bins": (bins_summary.summarise, bins_summary.as_markdown),
    "from_trace": (from_trace_summary.compare, from_trace_table.as_markdown),
}
"""By benchmark name: the function that summarises a case, and the function that formats the summaries as tables."""


def made(path: Path) -> str:
    """Returns the text of a result's ``.md`` file.

    Args:
        path: the ``.md`` file; the samples are next to it.
    """
    result = json.loads(path.with_suffix(".json").read_text())
    if path.name.startswith("gpu-check"):
        return check_summary.written(result)
    summarise, as_markdown = MAKERS[path.name.partition("-")[0]]
    return document(result, [summarise(case) for case in result["cases"]], as_markdown)


def write() -> None:
    """Writes the tables of all results."""
    checks = (path.with_suffix(".md") for path in RESULTS.glob("gpu-check-*.json"))
    for path in {*RESULTS.glob("*.md"), *checks}:
        path.write_text(made(path))
