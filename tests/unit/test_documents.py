"""Links between documents lead somewhere, and every document is in the index."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("", "docs", "docs/design", "benchmarks", "examples")
DOCUMENTS = [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).glob("*.md"))]


def anchors(document: Path) -> set[str]:
    """Names of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_somewhere(document):
    prose = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_the_index_has_every_document():
    docs = REPOSITORY / "docs"
    listed = set(re.findall(r"\(((?:\w+/)*\w+\.md)\)", (docs / "README.md").read_text()))
    assert listed == {str(path.relative_to(docs)) for path in docs.rglob("*.md")} - {"README.md"}
