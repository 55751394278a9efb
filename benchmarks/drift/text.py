"""A text whose topic changes, from Python's standard library: sources without prose, then prose, then character tables.

Megatron trains on it in this order, which :mod:`benchmarks.drift.in_rank` sees to.
"""

import ast
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from benchmarks.demo.data import run_tool
from benchmarks.demo.folder import Folder

TOPICS = ("code", "prose", "tables")
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_TABLES, _TOPICS_OF_HELP = "encodings", "pydoc_data"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def write_drifting_text(folder: Folder, topic_bytes: int) -> None:
    """Writes the data set: each topic once, of about ``topic_bytes``; ``folder`` has the tokenizer."""
    corpus = folder.data / "drift.jsonl"
    with corpus.open("w") as file:
        for topic in TOPICS:
            left = topic_bytes
            for text in _texts(topic):
                file.write(json.dumps({"text": text[:left]}) + "\n")
                left -= len(text)
                if left <= 0:
                    break
    folder.dataset = folder.data / "drift_text_document"
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", folder.tokenizer)
    prefix = ("--output-prefix", folder.data / "drift")
    run_tool(
        folder.prepare_log, "preprocess_data", "--input", corpus, *prefix, *tokenizer, "--append-eod", "--progress=off"
    )


def _texts(topic: str) -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parent.parts
        if _SKIPPED.intersection(folders):
            continue
        if _TABLES in folders:
            if topic == "tables":
                yield path.read_text(errors="replace")
            continue
        if topic == "tables":
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # a file for another version of Python
        if topic == "code" and _TOPICS_OF_HELP not in folders:
            yield _without_prose(tree)
        elif topic == "prose":
            yield from _prose(tree, has_topics=_TOPICS_OF_HELP in folders)


def _without_prose(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _prose(tree: ast.Module, has_topics: bool) -> Iterator[str]:
    """Docstrings of a module, or the texts of Python's help."""
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    if has_topics:
        constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        found += [value for value in constants if isinstance(value, str) and "\n" in value]
    if text := "\n\n".join(filter(None, found)):
        yield text
