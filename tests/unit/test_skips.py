"""The list of reasons for which CI may skip a test, and the setting that shows GPUs to the tests of GPUs only."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest, skips

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("reason", "allowed"),
    [
        ("Skipped: no Chromium: apt-get install chromium", True),
        ("can't make the test network: ip netns add: Operation not permitted.", True),
        ("the network benchmark needs root, to make network namespaces; this is user 1000.", True),
        ("the network benchmark needs ip and tc", False),
        ("shellcheck is not installed", False),
    ],
)
def test_skip_reasons_are_allowed_by_how_they_begin(reason, allowed):
    assert skips.is_allowed(reason) == allowed


def test_allowed_skip_reasons_are_still_in_use():
    sources = [*(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "benchmarks").rglob("*.py")]
    texts = [path.read_text() for path in sources if path.name not in ("skips.py", "test_skips.py")]
    assert [reason for reason in skips.ALLOWED if not any(reason in text for text in texts)] == []


@pytest.mark.parametrize(
    ("arguments", "visible"),
    [
        (["tests"], ""),
        (["tests/gpu", "tests/unit"], ""),
        (["tests/gpu"], "0"),
        (["tests/gpu/test_stream_transport.py::test_stream_transport_brings_counts_to_the_host"], "0"),
    ],
)
def test_gpus_are_visible_to_gpu_tests_only(monkeypatch, arguments, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    conftest.pytest_configure(SimpleNamespace(args=arguments, invocation_params=SimpleNamespace(dir=REPOSITORY)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
