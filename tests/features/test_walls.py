"""The files that every run, report and plan goes through name no feature: features join them by the protocol."""

import ast
import io
import re
import tokenize

import pytest

from tests.unit.test_imports import PACKAGE

SHARED = (
    *("config.py", "training/run.py", "training/overlap_setup.py", "report/summary.py", "planning/explain.py"),
    *("lab/check/shrink.py", "lab/dry_run/plan.py"),
)
CORE = ("schedule", "runtime", "model", "training", "report")
ALIASES = {
    "bins": ("bin", "packing"),
    "checkpoints": ("resumable", "sigterm"),
    "comm_priority": ("comm priority", "priority"),
    "comm_sms": ("sms",),
    "cuda_graphs": ("cuda graph", "graphs"),
    "dedup": ("dedup", "deduplicated"),
    "documents": ("document",),
    "ep_resize": ("separate expert grads", "resize"),
    "hugging_face": ("from hf", "save hf"),
    "hybrid": ("hybrid",),
    "mtp": ("mtp", "multi token", "predictions"),
    "pairing": ("pairing", "pair", "pairs", "paired"),
    "placement": ("placement", "placed"),
    "row_bound": ("row bound", "row limit", "expert rows", "split chunks", "rounds"),
    "te": ("te", "transformer engine"),
    "shortcut": ("late sum", "wired pairs"),
    "tiles": ("tile", "tiled", "tiling"),
    "tuning": ("tune", "tuner", "tuned"),
    "two_hop": ("two hops", "hop", "hops", "node", "nodes"),
}
"""Further names of each feature, in words."""
NAMES = (*(name.replace("_", " ") for name in ALIASES), *(name for some in ALIASES.values() for name in some))


def words(text: str) -> str:
    """The words of identifiers and texts, in lower case with single spaces: ``OverlapSetup`` is ``overlap setup``."""
    return " ".join(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower()))


def docstrings_of(source: str) -> set[int]:
    """First lines of the texts that are statements of their own."""
    return {
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def named_in(source: str) -> list[str]:
    """The identifiers and texts of a file that have a feature's name; docstrings and comments do not count."""
    docstrings = docstrings_of(source)
    kinds = tokenize.NAME, tokenize.STRING, tokenize.FSTRING_MIDDLE
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, NAMES))})\b")
    return [
        f"{token.start[0]}: {token.string}"
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type in kinds and token.start[0] not in docstrings and pattern.search(words(token.string))
    ]


@pytest.mark.parametrize("file", SHARED)
def test_no_feature_is_named(file):
    assert named_in((PACKAGE / file).read_text()) == []


def test_each_feature_has_its_names():
    assert {path.parent.name for path in PACKAGE.glob("features/*/__init__.py")} == set(ALIASES)


@pytest.mark.parametrize(
    "line", ["plan.is_paired", "import make_hops", "x = '--lancet-tiles'", "def f(max_expert_rows): ...", "HybridModel"]
)
def test_names_are_found(line):
    assert len(named_in(line)) == 1


def test_core_stays_small():
    """A change of the core needs these lines in mind: 16,051 before pairing, tuning and others became features."""
    core = [path for folder in CORE for path in (PACKAGE / folder).rglob("*.py")]
    assert sum(bool(line.strip()) for path in core for line in path.read_text().splitlines()) <= 12_500
