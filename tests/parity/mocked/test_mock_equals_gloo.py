import json
from pathlib import Path

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.distributed


def test_mocked_collectives_equal_gloos_bit_by_bit(tmp_path):
    worker = Path(__file__).with_name("mock_equality_worker.py")
    launch.check(launch.run(worker, [tmp_path / "result.json"], 2, tmp_path, timeout_s=90))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["different"] == []
    assert len(result["compared"]) == 22
