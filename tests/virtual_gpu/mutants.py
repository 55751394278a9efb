"""Deletes, misplaces or swaps statements that order kernels or messages or keep memory: a case must fail each time.

Usage: python -m tests.virtual_gpu.mutants [--json FILE] [--write] [--only TEXT]

Places are found in the source: waits and records of streams and events, ``record_stream``, switches of the current
stream, waits for collectives, launches of messages (``places/orders.py``), and attributes that only keep memory alive.
A case fails at its first problem, or with wrong numbers, or if messages have another order than without a mutant: NCCL
needs the same one on all ranks, so it is fixed by the plan. The mutated function is compiled and its code put in the
place of the original's while a case runs.
"""

import argparse
import datetime
import importlib
import inspect
import json
import logging
import re
import sys
import time
import types
from collections.abc import Iterator, Sequence
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
from tests.virtual_gpu.places.found import PRODUCT, Mutant, find, mutated_tree
from tests.virtual_gpu.places.needless import NEEDLESS
from tests.virtual_gpu.programs import run_program

REPORT = Path(__file__).parents[2] / "docs" / "virtual_gpu_mutants.json"
"""What each mutant made fail; ``--write`` makes it."""
TOLERANCE = 1e-4
EXCHANGE_STREAMS = {"comm", "counts"}
"""Where all-to-alls have to run."""


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


@contextmanager
def mutated(mutant: Mutant, number: int) -> Iterator[None]:
    """Inside the context the product runs with the mutant that :func:`find` has given this number."""
    tree = mutated_tree(mutant.file, number)
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
