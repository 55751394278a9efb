"""Which tests may be skipped in CI, and why: any other skip fails there, so that no test is lost unseen.

On a user's machine every skip is allowed and says its reason.
"""

import os
import re

import pytest

ALLOWED = {
    r"needs a CUDA device": "CI machines have none; run make test-gpu on one that has",
    r"needs Megatron-Bridge": "make test-bridge runs these, in an environment of its own; .ci/run calls it",
    r"make test runs": "a test of tests/gpu that runs on a device, or on the virtual GPU where none is seen",
    r"no Chromium": "CI installs it from the distribution, whose servers may not answer",
    r"can't make the test network": "a container may be started without the right to make network namespaces",
    r"the network benchmark needs root": "the user of a hosted CI service's runner is not root",
    r"the network benchmark needs 2 cores": "a container or a small machine may have one core",
    r"no full history of git here": "source distributions have none, shallow clones only a part; CI has all of it",
    r"this kernel allows no user namespaces": "a container or a distribution may forbid them",
}
"""What the reason of a skip begins with, as a regular expression: why CI goes on without the test."""


def in_ci() -> bool:
    """Whether the environment says that this is CI, as .ci/run and all common CI services do."""
    return os.environ.get("CI", "").lower() in ("1", "true")


def is_allowed(reason: str) -> bool:
    """Whether CI goes on without a test that is skipped for this reason."""
    return any(re.match(start, reason.removeprefix("Skipped: ")) for start in ALLOWED)


def failure(reason: str) -> str:
    """What is said of a test that CI must not skip."""
    return (
        f"skipped in CI: {reason.removeprefix('Skipped: ')}. CI expects this test to run: mend what is missing there, "
        "or add the reason to ALLOWED in tests/skips.py, and why."
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return checked((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return checked((yield))


def checked(report):
    """The report; in CI a skip becomes a failure unless its reason is listed."""
    if report.skipped and in_ci() and not is_allowed(report.longrepr[2]):
        report.outcome = "failed"
        report.longrepr = failure(report.longrepr[2])
    return report
