"""Functions and classes of Python sources: documents with real, very different lengths that every machine has."""

import ast
import io
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from megatron_lancet.errors import UsageError

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class UnparsableError(UsageError):
    """A file is not a source of the running Python."""


class Pair(NamedTuple):
    """A function in two parts, which joined are its source.

    Attributes:
        prompt: decorators, signature and docstring.
        answer: the rest of its body.
    """

    prompt: str
    answer: str


def functions(source: str, name: str) -> Iterator[tuple[str, str]]:
    """Yields (qualified name, source) of every function and method; those inside a function belong to that.

    Args:
        name: of the file, for messages.

    Raises:
        UnparsableError: the source is not one of the running Python.
    """
    lines = _lines(source)
    for qualified, node in _functions(_parsed(source, name), ""):
        yield qualified, _text(lines, _first_line(node), node.end_lineno, node.col_offset)


def classes(source: str, name: str) -> Iterator[tuple[str, str]]:
    """Yields (name, source) of every class of a module that is not inside another one; see :func:`functions`."""
    lines = _lines(source)
    for node in _parsed(source, name).body:
        if isinstance(node, ast.ClassDef):
            yield node.name, _text(lines, _first_line(node), node.end_lineno, node.col_offset)


def pairs(source: str, name: str) -> Iterator[tuple[str, Pair]]:
    """Yields (qualified name, pair) of every function with a docstring and a body after it; see :func:`functions`."""
    lines = _lines(source)
    for qualified, node in _functions(_parsed(source, name), ""):
        if ast.get_docstring(node, clean=False) is None or len(node.body) == 1:
            continue
        end_of_docstring = node.body[0].end_lineno
        assert end_of_docstring is not None, "the parser sets it"
        if node.body[1].lineno > end_of_docstring:
            yield (
                qualified,
                Pair(
                    _text(lines, _first_line(node), end_of_docstring, node.col_offset),
                    _text(lines, end_of_docstring + 1, node.end_lineno, node.col_offset),
                ),
            )


def _lines(source: str) -> list[str]:
    """Lines as Python counts them: a form feed, or another of Unicode's line ends, does not end one."""
    return list(io.StringIO(source, newline=""))


def _parsed(source: str, name: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:  # ValueError: null bytes
        raise UnparsableError(
            f"{name}: expected a source of the running Python, but it can't be parsed ({error}); skip such files with "
            "--skip-undecodable"
        ) from error


def _functions(node: ast.AST, scope: str) -> Iterator[tuple[str, _Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield scope + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{scope}{child.name}.")
        elif isinstance(child, ast.stmt):
            yield from _functions(child, scope)


def _first_line(node: _Function | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _text(lines: list[str], first: int, last: int | None, indent: int) -> str:
    """Lines ``first`` to ``last``, from 1, without the indent of the first of them.

    A line of a string may be indented less: it stays as it is.
    """
    return "".join(line[indent:] if not line[:indent].strip(" \t") else line for line in lines[first - 1 : last])
