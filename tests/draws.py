"""A pytest plugin: what Hypothesis draws is the same in every run, and new in ``make test-nightly``.

A failure of ``make test`` repeats itself, also when the test runs alone and whatever the environment is. The nightly
run draws :data:`FACTOR` times as many examples from a seed that it prints. Tests take their number of examples from
:func:`examples` and no other settings. Neither profile reads a clock.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

SAME, NIGHTLY = "same-draws", "nightly"
"""Names of the profiles of Hypothesis; ``--hypothesis-profile`` picks the second one."""
FACTOR = 10
"""Examples of a nightly run for each one of a usual run."""
FAILED = Path(__file__).parents[1] / ".hypothesis" / "examples"
"""Where a nightly run keeps the examples that failed. The next one begins with them."""
_BASE = settings.get_profile("default")
"""Hypothesis's own, not its profile for CI, which it takes where the environment says so."""
_NO_CLOCK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}

settings.register_profile(SAME, _BASE, derandomize=True, database=None, **_NO_CLOCK)
settings.register_profile(
    NIGHTLY,
    _BASE,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(FAILED),
    max_examples=FACTOR * _BASE.max_examples,
    **_NO_CLOCK,
)
settings.load_profile(SAME)


def factor() -> int:
    """Examples of this run for each one of a usual run."""
    return settings().max_examples // _BASE.max_examples


def examples(count: int, allowed: Sequence[HealthCheck] = ()) -> settings:
    """Decorates a test of Hypothesis that draws another number of examples than 100.

    Args:
        count: in a usual run.
        allowed: what the test does on purpose and Hypothesis would complain about.
    """
    return settings(max_examples=count * factor(), suppress_health_check=[*settings().suppress_health_check, *allowed])


@pytest.fixture(scope="session")
def new_seed(pytestconfig: pytest.Config) -> int | None:
    """Seed of a nightly run, for ranks that draw themselves; None in a usual run."""
    return int(pytestconfig.getoption("hypothesis_seed")) if is_nightly() else None


def is_nightly() -> bool:
    """Whether this run draws anew."""
    return not settings().derandomize


def pytest_configure(config: pytest.Config) -> None:
    """Refuses a nightly run that nobody could repeat."""
    seed = config.getoption("hypothesis_seed")
    if config.getoption("hypothesis_profile") == NIGHTLY and (seed is None or not seed.isdigit()):
        raise pytest.UsageError("expected a number as --hypothesis-seed of a nightly run: run make test-nightly")


def pytest_report_header(config: pytest.Config) -> str:
    """Says how to repeat the run."""
    if not is_nightly():
        return "draws of Hypothesis: the same in every run"
    seed = config.getoption("hypothesis_seed")
    return f"draws of Hypothesis: new, {FACTOR} times as many; repeat them with make test-nightly SEED={seed}"
