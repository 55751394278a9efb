"""Transformer Engine's context parallel attention runs on gloo and is the attention to the whole sequence."""

from pathlib import Path

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("attention_worker.py")
BF16_TOLERANCE = 2.0**-7
"""Two roundings to bf16: of the part of each rank's keys, and of their sum."""


def test_te_context_parallel_attention_equals_attention_to_the_whole_sequence(tmp_path):
    results = launch.results_of(WORKER, 2, tmp_path, 100, te=True)
    for differences in results:
        assert list(differences) == ["p2p", "a2a", "all_gather"]
        assert {name: found for name, found in differences.items() if max(found) > BF16_TOLERANCE} == {}
