"""Transformer Engine's context parallel attention runs on gloo and is the attention to the whole sequence."""

from pathlib import Path

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("attention_worker.py")
TOLERANCE = {"torch.float32": 1e-6, "torch.bfloat16": 2.0**-7}
"""Of the largest value. Two roundings to bf16: of the part of each rank's keys, and of their sum."""


def test_te_context_parallel_attention_equals_attention_to_the_whole_sequence(tmp_path):
    results = launch.results_of(WORKER, 2, tmp_path, 100, te=True)
    for differences in results:
        assert len(differences) == 6
        for name, found in differences.items():
            assert max(found) < TOLERANCE[name.split()[1]], name
