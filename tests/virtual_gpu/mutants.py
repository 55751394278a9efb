"""Deletes, misplaces or swaps statements that order kernels or messages or keep memory: a case must fail each time.

Usage: python -m tests.virtual_gpu.mutants [--json FILE] [--write] [--only TEXT]

Places are found in the source: waits and records of streams and events, ``record_stream``, switches of the current
stream, waits for collectives, launches of messages (``places/orders.py``), and attributes that only keep memory alive.
A case fails at its first problem, or with wrong numbers, or if messages have another order than without a mutant: NCCL
needs the same one on all ranks, so it is fixed by the plan. The mutated function is compiled and its code put in the
place of the original's while a case runs.
"""

import argparse
import ast
import datetime
import importlib
import inspect
import json
import logging
import re
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch

from megatron_lancet.patching import around
from megatron_lancet.testkit.virtual_gpu.memory import Memory
from tests.virtual_gpu.case import STREAMS, Case, run
from tests.virtual_gpu.cases import MUTANT_CASES
from tests.virtual_gpu.places.misplaced import REPLACED, misplaced
from tests.virtual_gpu.places.needless import NEEDLESS
from tests.virtual_gpu.places.orders import MESSAGES_IN, wrong_orders
from tests.virtual_gpu.programs import run_program

PRODUCT = Path(__file__).parents[2] / "megatron_lancet"
REPORT = Path(__file__).parents[2] / "docs" / "virtual_gpu_mutants.json"
"""What each mutant made fail; ``--write`` makes it."""
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
TOLERANCE = 1e-4
EXCHANGE_STREAMS = {"comm", "counts"}
"""Where all-to-alls have to run."""


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


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        case: the case that failed; empty if none did.
        how: what it reported first.
    """

    case: str
    how: str

    @property
    def is_silent(self) -> bool:
        """Whether the program itself goes on as if nothing were wrong."""
        return bool(self.case) and "Error" not in self.how.split(":")[0]


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


def _mutated_tree(file: str, number: int) -> ast.Module:
    source = (PRODUCT / file).read_text()
    tree = ast.parse(source)
    _, change = next(islice(_places(tree, source, file), number, None))
    change()
    return ast.fix_missing_locations(tree)


@contextmanager
def mutated(mutant: Mutant, number: int) -> Iterator[None]:
    """Inside the context the product runs with the mutant that :func:`find` has given this number."""
    tree = _mutated_tree(mutant.file, number)
    module = importlib.import_module("megatron_lancet." + mutant.file.removesuffix(".py").replace("/", "."))
    found: Any = module
    for name in mutant.function.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, property):
        found = found.fget
    function = inspect.unwrap(getattr(found, "__func__", found))
    code = _code_of(compile(tree, str(PRODUCT / mutant.file), "exec"), mutant.function)
    original = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = original


def _code_of(module: types.CodeType, qualified_name: str) -> types.CodeType:
    code = module
    for name in qualified_name.split("."):
        code = next(one for one in code.co_consts if isinstance(one, types.CodeType) and one.co_name == name)
    return code


class _Stop(Exception):  # noqa: N818 - it stops a run, with what was found
    """The first problem."""


def _stop(_: Any, __: Memory, kind: str, text: str) -> None:
    raise _Stop(f"{kind}: {text}")


def fails(name: str) -> str:
    """What a case reports first that should be clean; empty if it is."""
    clean, case = _clean(name), MUTANT_CASES[name]
    try:
        with around(Memory, "_add_problem", _stop):
            found = run(case) if isinstance(case, Case) else run_program(case)
    except _Stop as problem:
        return str(problem)
    except Exception as error:  # noqa: BLE001 - whatever a mutant breaks
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if not found.largest_error < TOLERANCE:
        return "wrong numbers"
    if not found.exchanges <= EXCHANGE_STREAMS:
        return f"all-to-alls on {sorted(found.exchanges)}: nothing is next to them"
    for number, (ours, expected) in enumerate(zip_longest(found.order, clean.order), start=1):
        if ours != expected:
            return f"order of messages: {ours} as number {number}, not {expected}"
    return ""


def learn_orders() -> None:
    """Runs the cases once, without a mutant: what a case sends, and waits for, has an order."""
    for name in MUTANT_CASES:
        _clean(name)


@dataclass(frozen=True)
class _Clean:
    """
    Attributes:
        order: see :class:`Found`.
        entered: file and qualified name of each function of the product that ran.
    """

    order: Sequence[str]
    entered: frozenset[tuple[str, str]]


@cache
def _clean(name: str) -> _Clean:
    case, codes, monitoring = MUTANT_CASES[name], set[types.CodeType](), sys.monitoring

    def enters(code: types.CodeType, _: int) -> Any:
        codes.add(code)
        return monitoring.DISABLE

    monitoring.use_tool_id(monitoring.COVERAGE_ID, __name__)
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.PY_START, enters)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.PY_START)
    try:
        monitoring.restart_events()
        order = (run(case) if isinstance(case, Case) else run_program(case)).order
    finally:
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.NO_EVENTS)
        monitoring.free_tool_id(monitoring.COVERAGE_ID)
    files = ((Path(code.co_filename), code.co_qualname) for code in codes)
    own = ((path.relative_to(PRODUCT), name) for path, name in files if path.is_relative_to(PRODUCT))
    return _Clean(order, frozenset((str(path), name) for path, name in own))


def verdict(mutant: Mutant, number: int) -> Verdict:
    """The first of the cases that catches a mutant."""
    with mutated(mutant, number):
        for name in MUTANT_CASES:
            if (mutant.file, mutant.function) not in _clean(name).entered:
                continue
            how = fails(name)
            if how:
                return Verdict(name, how)
    return Verdict("", "")


def is_needless(mutant: Mutant) -> bool:
    """Whether the list has a proof that the place is not needed on CUDA, or not for order and memory."""
    return bool(why_needless(mutant))


def why_needless(mutant: Mutant) -> str:
    """The reason in the list, for the place or for this change of it; empty if there is none."""
    return NEEDLESS.get(mutant.place) or NEEDLESS.get((*mutant.place, mutant.change), "")


def reported() -> dict[str, dict[str, Any]]:
    """Returns the rows of the report by mutant."""
    if not REPORT.exists():
        return {}
    return {row["mutant"]: row for row in json.loads(REPORT.read_text())["mutants"]}


def reason(how: str) -> str:
    """Returns a problem's kind, kernels and streams, or an error's type and message, without code locations."""
    return re.sub(r" \([^()]*\)| of group \d+| as number \d+", "", how)


def survey(only: str) -> list[dict[str, Any]]:
    """Every mutant with the case that catches it, and with a stream that makes its numbers wrong if it is late."""
    rows: list[dict[str, Any]] = []
    learn_orders()
    for mutant, number in find().items():
        if only not in str(mutant):
            continue
        start_s = time.process_time()
        found = verdict(mutant, number)
        cpu_s = time.process_time() - start_s
        wrong = wrong_when_late(mutant, number, found.case) if found.is_silent else []
        reason = "" if found.case else why_needless(mutant)
        rows.append({"mutant": str(mutant), **asdict(found), "wrong_when_late": wrong, "reason": reason})
        sys.stdout.write(f"{found.case or 'NOT CAUGHT':16} {cpu_s:4.1f} s {mutant}\n")
        sys.stdout.flush()
    return rows


def wrong_when_late(mutant: Mutant, number: int, name: str) -> list[str]:
    """Name of the first stream that, late, makes losses or gradients wrong; empty if none does."""
    with mutated(mutant, number):
        return [*islice((stream for stream in STREAMS if is_wrong_when_late(name, stream)), 1)]


def is_wrong_when_late(name: str, stream: str) -> bool:
    """Returns whether a late stream changes the results of a case with the current code."""
    case = replace(MUTANT_CASES[name], late=((stream,),))
    try:
        found = run(case) if isinstance(case, Case) else run_program(case)
    except Exception:  # noqa: BLE001 - poisoned counts may raise anything
        return True
    return not found.largest_error < TOLERANCE


def main() -> None:
    from megatron_lancet.training.platform.cpu import cpu_platform

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the report")
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.name} and its text")
    parser.add_argument("--only", default="", help="mutants whose text contains this; the others' rows stay")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)

    command = " ".join(["python -m tests.virtual_gpu.mutants", *sys.argv[1:]])
    with cpu_platform():
        rows = {name: row for name, row in reported().items() if args.only and args.only not in name}
        rows |= {row["mutant"]: row for row in survey(args.only)}
    ordered = [rows[name] for name in map(str, find()) if name in rows]
    report = {"command": command, "date": str(datetime.date.today()), "mutants": ordered}
    text = json.dumps(report, indent=1) + "\n"
    if args.json is not None:
        args.json.write_text(text)
    if args.write:
        REPORT.write_text(text)


if __name__ == "__main__":
    main()
