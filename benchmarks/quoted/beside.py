"""The tables beside the samples of a result: made anew from the samples, by today's code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bins import summary as bins_summary
from benchmarks.causes import summary as causes_summary
from benchmarks.evaluation import summary as evaluation_summary
from benchmarks.from_trace import summary as from_trace_summary
from benchmarks.from_trace import table as from_trace_table
from benchmarks.harness.tables import document
from benchmarks.network import summary as network_summary
from benchmarks.network import table as network_table
from benchmarks.prediction import errors as prediction_errors
from benchmarks.prediction import table as prediction_table
from benchmarks.priority import summary as priority_summary

RESULTS = Path(__file__).parents[1] / "results"
MAKERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "network": (network_summary.summarise, network_table.as_markdown),
    "prediction": (prediction_errors.compare, prediction_table.as_markdown),
    "priority": (priority_summary.summarise, priority_summary.as_markdown),
    "causes": (causes_summary.summarise, causes_summary.as_markdown),
    "evaluation": (evaluation_summary.summarise, evaluation_summary.as_markdown),
    "bins": (bins_summary.summarise, bins_summary.as_markdown),
    "from_trace": (from_trace_summary.compare, from_trace_table.as_markdown),
}
"""By the name of a benchmark: what summarises a case, and what makes tables of the summaries."""


def made(path: Path) -> str:
    """The text for a result's ``.md``.

    Args:
        path: of that file; the samples are beside it.
    """
    summarise, as_markdown = MAKERS[path.name.partition("-")[0]]
    result = json.loads(path.with_suffix(".json").read_text())
    return document(result, [summarise(case) for case in result["cases"]], as_markdown)


def write() -> None:
    """All of them."""
    for path in RESULTS.glob("*.md"):
        path.write_text(made(path))
