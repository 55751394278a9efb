"""Unit tests read no clock and wait for no time to pass, so their results do not depend on the machine's load."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

UNIT = Path(__file__).parent
STAND_INS = UNIT.parent.glob("*.py")
READS = frozenset(["now", "today", "utcnow", "Timer", "alarm", "setitimer", "sleep"])
"""Classes and methods that read or wait for a clock, in addition to the module ``time``."""
WAITS = {"wait": 0, "wait_for": 1, "join": 0, "acquire": 1, "result": 0, "get": 9, "select": 3}
"""Methods that may have a timeout, and its position in the arguments; ``get`` needs the keyword."""


def clocks(source: str) -> Iterator[str]:
    """Yields code that reads or waits for a clock."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {name.name}" for name in node.names if name.name == "time")
        elif isinstance(node, ast.ImportFrom):
            names = [name.name for name in node.names if node.module == "time" or name.name in READS]
            yield from (f"from {node.module} import {name}" for name in names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            place = WAITS.get(node.func.attr)
            if node.func.attr in READS or (place is not None and has_limit(node, place)):
                yield ast.unparse(node)


def has_limit(call: ast.Call, place: int) -> bool:
    """Returns whether a wait has a timeout: a number, or a name that ends in ``_s`` or ``timeout``."""
    limits = [*call.args[place : place + 1], *(word.value for word in call.keywords if word.arg == "timeout")]
    return any(isinstance(limit, ast.Constant | ast.Name) and is_time(limit) for limit in limits)


def is_time(limit: ast.Constant | ast.Name) -> bool:
    if isinstance(limit, ast.Name):
        return limit.id.lower().endswith(("_s", "timeout"))
    return isinstance(limit.value, int | float) and not isinstance(limit.value, bool)


def test_unit_tests_and_their_stand_ins_read_no_clock():
    found = {str(path.relative_to(UNIT.parent)): list(clocks(path.read_text())) for path in UNIT.rglob("*.py")}
    found |= {path.name: list(clocks(path.read_text())) for path in STAND_INS}
    wrong = {file: uses for file, uses in found.items() if uses}
    assert wrong == {}, "use a test clock or an event; a test about time belongs in tests/clocks"


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "def test():\n    import time as clock",
        "from time import sleep, perf_counter",
        "threading.Timer(0.1, print).start()",
        "from threading import Timer",
        "datetime.datetime.now()",
        "event.wait(0.05)",
        "thread.join(timeout=5)",
        "lock.acquire(True, 2.0)",
        "future.result(TIMEOUT_S)",
        "queue.get(timeout=limit_s)",
        "asyncio.sleep(1)",
        "signal.alarm(3)",
    ],
)
def test_reads_of_clocks_are_found(source):
    assert list(clocks(source))


def test_clocks_of_tests_and_waits_without_limit_are_not_found():
    source = """
        monkeypatch.setattr(trace.time, "perf_counter", lambda: now_s)
        event.wait(); thread.join(); future.result(); work.wait(timedelta(milliseconds=1))
        exchange.wait(sent); found.get("name", 0); "".join(words)
    """
    assert not list(clocks("if True:\n" + source))
