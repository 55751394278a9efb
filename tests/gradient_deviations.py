"""A pytest plugin: compares gradients with a bound, and prints the worst deviation of the whole run at its end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from benchmarks.gradient_error import worst

PROPERTY = "gradient deviation"
TOLERANCE = 2e-6
"""Of the norm of each parameter's gradient, fp32. Chunks change the order of sums and nothing else: about 5e-7 in the
models of these tests. A naive auxiliary loss per chunk is off by 1, a single lost dW by 0.1: both are tested too."""


class GradientCheck:
    """Compares deviations from stock with a bound, and remembers the worst of them for the summary of the run."""

    def __init__(self, record_property: Callable[[str, object], None]) -> None:
        self._record_property = record_property

    def __call__(self, errors: Mapping[str, float], bound: float, where: str = "", precision: str = "fp32") -> None:
        """Fail unless every parameter's error is within the bound.

        Args:
            errors: relative error by parameter, see ``benchmarks.gradient_error``.
            where: what to say next to the parameter, such as the rank.
            precision: of the gradients; each one has its own line in the summary.
        """
        parameter, error = worst(errors)
        self._record_property(PROPERTY, [precision, error, parameter])
        assert error <= bound, f"gradient of {parameter} deviates by {error:.3g}, at most {bound:.3g} expected: {where}"

    def equal_stock(self, results: Sequence[Mapping[str, Any]], case: str, bound: float) -> None:
        """Fail unless a case's results are stock's within the bound, and DDP got each gradient once.

        Args:
            results: per rank, what is found for each case.
        """
        for rank, result in enumerate(results):
            found = result[case]
            self(found["gradients"], bound, f"rank {rank}", precision_of(case))
            assert found["loss"] <= bound
            assert found["logged"] <= bound
            assert found["logged_names_equal"]
            assert found["reports"] == dict.fromkeys(found["parameters"], 1)


def precision_of(case: str) -> str:
    """Of the gradients in a case of that name."""
    return "bf16" if "bf16" in case.split("/") else "fp32"


@pytest.fixture
def check_gradients(record_property) -> GradientCheck:
    """Compares deviations of gradients with a bound; the worst one of all tests is printed at the end of the run."""
    return GradientCheck(record_property)


def pytest_terminal_summary(terminalreporter) -> None:
    """Reports of tests carry their properties, also from the processes of pytest-xdist to this one."""
    found: dict[str, tuple[float, str, str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == PROPERTY:
                    precision, error, parameter = value
                    found[precision] = max(found.get(precision, (-1.0, "", "")), (error, report.nodeid, parameter))
    for precision, (error, test, parameter) in sorted(found.items()):
        line = f"worst gradient deviation of this run, {precision}: {error:.2e} in {test} (parameter {parameter})"
        terminalreporter.write_line(line)
