"""Unit tests start no process: one that does fails, and belongs into tests/cli, tests/faults or tests/parity."""

import sys

import pytest

STARTS = frozenset(["subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"])
"""Audit events of Python: https://docs.python.org/3/library/audit_events.html."""


class ProcessWatch:
    """Keeps the audit events with which the running test started a process. Python can't remove an audit hook."""

    def __init__(self) -> None:
        self.events: list[str] | None = None

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.events is not None and event in STARTS:
            self.events.append(f"{event}{arguments[:2]}")


_watch = ProcessWatch()
sys.addaudithook(_watch.hook)


@pytest.fixture(autouse=True)
def no_process_is_started():
    _watch.events = []
    yield
    started, _watch.events = _watch.events, None
    assert not started, f"a unit test started a process: {started[0]}. Move the test to tests/cli, faults or parity."
