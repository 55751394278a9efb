"""A pytest plugin: Hypothesis draws the same examples in every run, and new examples in ``make test-nightly``.

A failure of ``make test`` repeats in every environment, even if the test runs alone. The nightly run draws
:data:`FACTOR` times as many examples from a seed that it prints. Tests set their number of examples with
:func:`examples` and use no other settings. Neither profile reads a clock.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

SAME, NIGHTLY = "same-draws", "nightly"
"""Names of the Hypothesis profiles; ``--hypothesis-profile`` selects the second."""
FACTOR = 10
"""Nightly examples per example of a normal run."""
FAILED = Path(__file__).parents[1] / ".hypothesis" / "examples"
"""A nightly run keeps failed examples here. The next nightly run starts with them."""
_BASE = settings.get_profile("default")
"""Hypothesis's default, not the CI profile that it selects from the environment."""
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
    """Returns the examples of this run per example of a normal run."""
    return settings().max_examples // _BASE.max_examples


def examples(count: int, allowed: Sequence[HealthCheck] = ()) -> settings:
    """Decorates a Hypothesis test that draws a number of examples other than 100.

    Args:
        count: number in a normal run.
        allowed: health checks that the test fails on purpose.
    """
    return settings(max_examples=count * factor(), suppress_health_check=[*settings().suppress_health_check, *allowed])


@pytest.fixture(scope="session")
def new_seed(pytestconfig: pytest.Config) -> int | None:
    """Seed of a nightly run, for ranks that draw their own examples; None in a normal run."""
    return int(pytestconfig.getoption("hypothesis_seed")) if is_nightly() else None


def is_nightly() -> bool:
    """Returns whether this run draws new examples."""
    return not settings().derandomize


def pytest_configure(config: pytest.Config) -> None:
    """Refuses a nightly run that cannot be repeated."""
    seed = config.getoption("hypothesis_seed")
    if config.getoption("hypothesis_profile") == NIGHTLY and (seed is None or not seed.isdigit()):
        raise pytest.UsageError("expected a number for --hypothesis-seed in a nightly run: run make test-nightly")


def pytest_report_header(config: pytest.Config) -> str:
    """Reports how to repeat the run."""
    if not is_nightly():
        return "Hypothesis draws: the same in every run"
    seed = config.getoption("hypothesis_seed")
    return f"Hypothesis draws: new, {FACTOR} times as many; repeat with make test-nightly SEED={seed}"
