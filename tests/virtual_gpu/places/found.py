"""Finds the places of mutants in the source of the product."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tests.virtual_gpu.places.misplaced import REPLACED, misplaced
from tests.virtual_gpu.places.orders import MESSAGES_IN, wrong_orders

PRODUCT = Path(__file__).parents[3] / "megatron_lancet"
NOT_PRODUCT = ("testkit/", "training/platform/")
"""The stand-ins themselves."""
STATEMENTS = {"wait_event", "wait_stream", "record_stream", "record_event", "record", "synchronize"}
WRAPPERS = {"block", "block_current"}
"""Methods of the product that do nothing but wait."""
KEEPERS = (
    "runtime/",
    "features/comm_priority/",
    "model/dispatcher/",
    "model/local_experts/",
    "features/dedup/",
    "features/two_hop/",
    "features/row_bound/limit.py",
    "features/row_bound/rounds.py",
    "features/tiles/parts.py",
)
"""Where attributes are taken for kept memory if they are released, or never read."""
MISPLACED_IN = tuple({*(place.file for place in REPLACED), *MESSAGES_IN})
NOT_KEEPERS = ("features/pairing/lane.py", "features/pairing/pairing.py", "runtime/position.py")
"""Whose attributes say what runs now. A thread would wait forever without them."""
_WORDS = (*STATEMENTS, *WRAPPERS, "torch.cuda.stream", ".wait(", "ReadyEvent(")
"""A file that has none of them has no call that is a place."""


@dataclass(frozen=True)
class Mutant:
    """One place in the product and what is done to it.

    Attributes:
        file: path in the package.
        function: qualified name of the outermost function.
        line: first line of the place, without indentation.
        index: place among equal ones in the function.
    """

    file: str
    function: str
    change: str
    line: str
    index: int = 0

    @property
    def place(self) -> tuple[str, str, str]:
        """Its key in the list of places that are not needed."""
        return self.file, self.function, self.line

    def __str__(self) -> str:
        number = f" ({self.index + 1})" if self.index else ""
        return f"{self.file} {self.function}: {self.line}{number} [{self.change}]"


type _Function = ast.FunctionDef
type _Change = Callable[[], None]


def find() -> dict[Mutant, int]:
    """All mutants of the product, each with its number in its file."""
    found: dict[Mutant, int] = {}
    for path in sorted(PRODUCT.rglob("*.py")):
        file = str(path.relative_to(PRODUCT))
        source = "" if file.startswith(NOT_PRODUCT) else path.read_text()
        if any(word in source for word in _WORDS) or file.startswith((*KEEPERS, *MISPLACED_IN)):
            for number, (mutant, _) in enumerate(_places(ast.parse(source), source, file)):
                while mutant in found:
                    mutant = replace(mutant, index=mutant.index + 1)
                found[mutant] = number
    return found


def _places(tree: ast.Module, source: str, file: str) -> Iterator[tuple[Mutant, _Change]]:
    lines = source.splitlines()
    emptied = _emptied(tree) if file.startswith(KEEPERS) and file not in NOT_KEEPERS else None
    for name, function, owner in _functions(tree):
        for node, text, change, apply in (*_calls(function), *_kept(function, owner, emptied)):
            yield Mutant(file, name, change, text or lines[node.lineno - 1].strip()), apply
        for block in _blocks(function):
            for index, statement in enumerate(block):
                line = lines[statement.lineno - 1].strip()
                for change, apply in misplaced(file, name, line, block, index):
                    yield Mutant(file, name, change, line), apply
                for change, apply in wrong_orders(file, function, block, index):
                    yield Mutant(file, name, change, line), apply


def _blocks(function: _Function) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield block


def _functions(tree: ast.Module) -> Iterator[tuple[str, _Function, ast.ClassDef | None]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node, None
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method, node


def _calls(function: _Function) -> Iterator[tuple[ast.AST, str, str, _Change]]:
    statements = {id(node.value): node for node in ast.walk(function) if isinstance(node, ast.Expr)}
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = node.func.attr
        is_work = name == "wait" and "work" in ast.unparse(node.func.value).rpartition(".")[2]
        if name == "stream" and ast.unparse(node.func) == "torch.cuda.stream":
            yield node, "", "stream not switched", _setter(node, "args", [ast.Constant(None)])
        elif name in STATEMENTS | WRAPPERS or is_work:
            statement = statements.get(id(node))
            if statement is not None:
                yield node, "", "deleted", _setter(statement, "value", ast.Constant(None))
            elif name == "record_event":
                yield node, "", "never recorded", _becomes(node, "torch.cuda.Event()")


def _kept(
    function: _Function, owner: ast.ClassDef | None, emptied: set[str] | None
) -> Iterator[tuple[ast.AST, str, str, _Change]]:
    """Attributes that the function sets and that only keep memory: they are emptied at its end."""
    if owner is None or emptied is None:
        return
    for name in sorted(_assigned(function) & (emptied | _never_read(owner))):
        statement = ast.parse(f"self.{name} = None").body

        def apply(statement: list[ast.stmt] = statement) -> None:
            function.body = [ast.Try(body=function.body, handlers=[], orelse=[], finalbody=statement)]

        yield function, f"self.{name} = ...", "not kept", apply


def _never_read(owner: ast.ClassDef) -> set[str]:
    """Private attributes that a class sets and never reads."""
    stored: set[str] = set()
    read: set[str] = set()
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and node.attr.startswith("_"):
            (stored if isinstance(node.ctx, ast.Store) else read).add(node.attr)
    return stored - read


def _emptied(tree: ast.Module) -> set[str]:
    """Private attributes that classes of a module empty when they have used them."""
    functions = [function for name, function, _ in _functions(tree) if not name.endswith("__init__")]
    return {name for function in functions for name in _assigned(function, empty=True)}


def _assigned(function: _Function, empty: bool = False) -> set[str]:
    """Private attributes of ``self`` to which the function assigns a value, or None or an empty tuple."""
    names = set()
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = node.value
        for target in targets:
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for one, its in pairs:
                is_own = isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"
                if is_own and its is not None and (ast.unparse(its) in ("None", "()", "[]")) is empty:
                    names.add(one.attr)
    return {name for name in names if name.startswith("_")}


def _setter(node: Any, field: str, value: Any) -> _Change:
    return lambda: setattr(node, field, value)


def _becomes(node: ast.Call, expression: str) -> _Change:
    def apply() -> None:
        new = ast.parse(expression, mode="eval").body
        assert isinstance(new, ast.Call)
        node.func, node.args, node.keywords = new.func, new.args, new.keywords

    return apply


def mutated_tree(file: str, number: int) -> ast.Module:
    """A file of the product with the mutant that :func:`find` has given this number."""
    source = (PRODUCT / file).read_text()
    tree = ast.parse(source)
    _, change = next(islice(_places(tree, source, file), number, None))
    change()
    return ast.fix_missing_locations(tree)
