"""Links between documents lead somewhere, every document is in the index, and the source files that they name exist."""

import functools
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("", "docs", "docs/design", "docs/features", "benchmarks", "examples")
DOCUMENTS = [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).glob("*.md"))]


def anchors(document: Path) -> set[str]:
    """Names of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_of_documents_have_a_target(document):
    prose = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_document_index_has_every_document():
    docs = REPOSITORY / "docs"
    listed = set(re.findall(r"\(((?:\w+/)*\w+\.md)\)", (docs / "README.md").read_text()))
    assert listed == {str(path.relative_to(docs)) for path in docs.rglob("*.md")} - {"README.md"}


@functools.cache
def sources() -> list[str]:
    """Paths of the repository's Python files."""
    return [f"/{path.relative_to(REPOSITORY)}" for path in REPOSITORY.rglob("*.py") if ".venv" not in path.parts]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_source_files_that_are_named_exist(document):
    in_megatron = {"pretrain_gpt.py", "pretrain_hybrid.py"}
    named = set(re.findall(r"`([\w./-]+\.py)`", document.read_text())) - in_megatron
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in sources())} == set()


def test_no_page_says_that_no_gpu_ran_it():
    claim = re.compile(
        r"(never|nothing|none|not|n't)\b[^.|]{0,40}\b(run|ran|measured|executed)\b[^.|]{0,20}\bon (a|any) (GPU|device)",
        re.I,
    )
    assert claim.search("This project has never run on a GPU.")
    assert [path.name for path in DOCUMENTS if claim.search(" ".join(path.read_text().split()))] == []


def test_documents_do_not_call_a_tested_property_proven():
    proven = re.compile(r"\bprove[ns]?\b", re.I)
    assert [str(path.relative_to(REPOSITORY)) for path in DOCUMENTS if proven.search(path.read_text())] == []
