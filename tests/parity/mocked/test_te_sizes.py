"""The parameters that a dry run counts are those of Transformer Engine's layers, too, which Megatron builds."""

import json
from pathlib import Path

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("te_sizes_worker.py")


def test_counted_parameters_equal_those_of_transformer_engines_layers(tmp_path):
    result = tmp_path / "sizes.json"
    launch.check(launch.run(WORKER, [result], 1, tmp_path, te=True))
    sizes = json.loads(result.read_text())
    assert len(sizes) == 6
    assert {name: size["counted"] for name, size in sizes.items()} == {
        name: size["built"] for name, size in sizes.items()
    }
