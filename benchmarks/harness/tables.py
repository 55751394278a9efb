"""Tables as aligned text for a terminal and as markdown, and the files that a benchmark leaves."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import machine_speed
from benchmarks.harness.origin import first_lines


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left and the others to the right.

    Args:
        lines: of cells, the headings first.
    """
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """The same as a table of markdown."""
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])


def document(result: dict[str, Any], summaries: Sequence[Any], as_markdown: Callable[[Sequence[Any]], str]) -> str:
    """Returns the document of a result: the origin of its samples, and the tables."""
    return f"{first_lines(result)}\n\n{as_markdown(summaries)}"


def write_results(
    result: dict[str, Any],
    output: Path,
    summarise: Callable[[dict[str, Any]], Any],
    as_text: Callable[[Sequence[Any]], str],
    as_markdown: Callable[[Sequence[Any]], str],
    draw: Callable[[Sequence[Any], Path], None] | None = None,
) -> None:
    """Print the tables and write them, all samples, and a picture if there is one.

    Args:
        result: the origin from :func:`benchmarks.harness.origin.finished`, and the measured ``cases``.
        output: path of the files, without a suffix.
    """
    summaries = [summarise(case) for case in result["cases"]]
    print(f"\n{as_text(summaries)}\n\n{machine_speed.described(result['machine_speed'])}")
    output.parent.mkdir(parents=True, exist_ok=True)
    written = [output.with_name(output.name + suffix) for suffix in (".json", ".md", ".png")]
    written[0].write_text(json.dumps(result) + "\n")
    written[1].write_text(document(result, summaries, as_markdown))
    if draw is None:
        written.pop()
    else:
        draw(summaries, written[2])
    print(f"written to {', '.join(map(str, written))}")
