"""Measured numbers in documents link to their result, with a mark if it has no traceable commit."""

import re
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks import provenance
from tests.unit.test_documents import DOCUMENTS, REPOSITORY

RESULT = re.compile(r"\]\((?:\.\./)*(?:benchmarks/)?results/([\w-]+)\.\w+\)")
"""A link to a committed result, its tables or its picture."""
NUMBER = re.compile(r"\d\.\d|\de[+-]\d|\d ?(?:%|ms\b|us\b|s\b|[kMG]B\b)")
COMMAND = re.compile(r"(?:`|```\n)(?:\w+=\S+ |sudo )*(?:python|make|torchrun|sh) ")
DATE = re.compile(r"20\d\d-\d\d-\d\d")
NO_SAMPLES = re.compile(r"[Nn]o\s+samples\s+(?:are\s+committed|were\s+kept)")
FEWEST_NUMBERS = 3
"""Fewest numeric cells in a table of numbers."""
NOT_MEASURED = {
    ("docs/gpus.md", "The first run on a new machine"): "limits of time",
    ("benchmarks/RESULTS.md", "Targets and misses"): "figures of the tables around it, by case",
    ("docs/support.md", "What is supported"): "bounds of tests",
    ("docs/virtual_gpu.md", "Figures"): "modelled: no clock is read",
    ("docs/design/megatron.md", "What is used and changed of Megatron"): "versions",
    ("docs/features/dispatch.md", "Where it pays"): "calculated, by the program below it",
    ("examples/README.md", "Launch scripts"): "sizes of models",
}
"""Contents of tables with unmeasured numbers, by document and heading."""


def name_of(document: Path) -> str:
    return str(document.relative_to(REPOSITORY))


def lacking_marks(text: str, marks: dict[str, str]) -> list[tuple[str, str]]:
    """Returns results that a paragraph, heading or table row links to without their mark after a link."""
    return [
        (name, place.strip())
        for place in re.split(r"\n\s*\n|\n(?=\||#)", text)
        for name in dict.fromkeys(RESULT.findall(place))
        if name in marks and not re.search(rf"results/{name}\.\w+\) \({marks[name]}\)", place)
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_results_without_a_commit_are_quoted_with_a_mark(document):
    marks = {name: entry["mark"] for name, entry in provenance.marked().items()}
    assert lacking_marks(document.read_text(), marks) == []


def test_each_place_that_quotes_a_marked_result_needs_the_mark():
    marks = {"network-1": "commit lost"}
    both = "[a](../benchmarks/results/network-1.md),\n[b](../benchmarks/results/network-1.json)"
    row = "| [1](results/network-1.json)"
    assert lacking_marks(f"{both} (commit lost)\n\n| x |\n{row} (commit lost) DISTURBED |", marks) == []
    assert lacking_marks(f"{both} (no commit)\n\n{both} (commit lost)\n| x |\n{row} |", marks) == [
        ("network-1", f"{both} (no commit)"),
        ("network-1", f"{row} |"),
    ]


def parts(text: str) -> list[tuple[str, str]]:
    """Splits a document into tables, headings and other text, in order, with their kind."""
    kinds, in_code = [], False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        kinds.append({"|": "table", "#": "heading"}.get(line[:1], "text") if not in_code else "text")
    lines = zip(kinds, text.splitlines(), strict=True)
    return [(kind, "\n".join(line for _, line in group)) for kind, group in groupby(lines, key=lambda one: one[0])]


def tables_without_source(text: str) -> list[str]:
    """Returns headings of number tables without a link to a result in the table or the adjacent text.

    A statement that no samples are committed replaces the link if the text has the command and the date.
    """
    found, heading = [], ""
    ordered = [("", ""), *parts(text), ("", "")]
    for before, (kind, part), after in zip(ordered, ordered[1:], ordered[2:], strict=False):
        if kind == "heading":
            heading = part.lstrip("# ")
        if kind != "table":
            continue
        cells = [cell for row in part.splitlines()[2:] for cell in re.sub(r"`[^`]*`", "", row).split("|")]
        around = "\n".join([part, *(text for kind, text in (before, after) if kind == "text")])
        is_told = all(one.search(around) for one in (NO_SAMPLES, COMMAND, DATE)) or RESULT.search(around)
        if sum(bool(NUMBER.search(cell)) for cell in cells) >= FEWEST_NUMBERS and not is_told:
            found.append(heading)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_tables_of_measured_numbers_name_their_result(document):
    listed = {heading for name, heading in NOT_MEASURED if name == name_of(document)}
    assert set(tables_without_source(document.read_text())) == listed


TABLE = "# T\n\n{}\n\n| a | b |\n|---|---|\n| x | 1.5 ms |\n| y | 2.5 ms |\n| z | 3.5 ms |\n\n{}\n"


@pytest.mark.parametrize(
    ("before", "after", "is_told"),
    [
        ("Quickly:", "", False),
        ("`python -m x`, 2026-11-22:", "", False),
        ("[samples](../benchmarks/results/x-2026-11-22.json):", "", True),
        ("Quickly:", "Samples: [x](results/x-2026-11-22.json).", True),
        ("`OMP_NUM_THREADS=1 python -m x`, 2026-11-22:", "No samples are committed.", True),
        ("```\nmake bench\n```\n2026-11-22, no samples\nwere kept:", "", True),
        ("Quickly, 2026-11-22:", "No samples are committed.", False),
        ("`python -m x`:", "No samples are committed.", False),
        ("[samples](results/x.json)\n\n## U\n", "## V\n\n[samples](results/x.json)", False),
        ("[samples](results/x.json)\n| a |\n|---|\nText.", "| a |\n|---|\n\n[samples](results/x.json)", False),
    ],
)
def test_table_needs_a_result_nearby(before, after, is_told):
    assert bool(tables_without_source(TABLE.format(before, after))) is not is_told
