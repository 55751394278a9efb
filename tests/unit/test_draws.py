"""Hypothesis draws the same examples in every run of ``make test``, and no health check reads a clock."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

from tests import draws

TESTS = Path(__file__).parents[1]
OVERRIDES = frozenset(["settings", "seed", "reproduce_failure", "register_random"])
ALLOWED = {
    "draws.py": "the profiles",
    "unit/test_draws.py": "reads the profiles",
    "parity/mocked/random_configs_worker.py": "a process without pytest, which has both kinds of draws",
}


def overrides(source: str) -> Iterator[str]:
    """Yields the names from Hypothesis that a file uses to override the profile."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hypothesis"):
            yield from (name.name for name in node.names if name.name in OVERRIDES)
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "hypothesis")


def test_no_test_overrides_the_profile():
    found = {str(path.relative_to(TESTS)): list(overrides(path.read_text())) for path in TESTS.rglob("*.py")}
    assert {file for file, names in found.items() if names} == set(ALLOWED), "use examples from tests/draws.py"


@pytest.mark.parametrize(
    "source",
    [
        "from hypothesis import given, settings",
        "from hypothesis import settings as chosen",
        "import hypothesis",
        "import hypothesis as h",
        "from hypothesis._settings import settings",
        "def test():\n    from hypothesis import seed",
    ],
)
def test_overrides_are_found(source):
    assert list(overrides(source))


@pytest.mark.parametrize("name", [draws.SAME, draws.NIGHTLY])
def test_no_profile_reads_a_clock(name):
    profile = settings.get_profile(name)
    assert profile.deadline is None
    assert HealthCheck.too_slow in profile.suppress_health_check


@pytest.mark.parametrize("seed", [None, "today"])
def test_nightly_run_that_nobody_could_repeat_is_refused(seed):
    options = {"hypothesis_profile": draws.NIGHTLY, "hypothesis_seed": seed}
    with pytest.raises(pytest.UsageError, match="expected a number for --hypothesis-seed in a nightly run"):
        draws.pytest_configure(SimpleNamespace(getoption=options.get))
    draws.pytest_configure(SimpleNamespace(getoption={**options, "hypothesis_profile": None}.get))
