import json
from pathlib import Path

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.distributed


def test_transport_delivers_rows_of_any_size_and_skew(tmp_path):
    worker = Path(__file__).with_name("transport_worker.py")
    launch.check(launch.run(worker, [tmp_path / "result.json"], 3, tmp_path, timeout_s=90))
    for rank in range(3):
        result = json.loads((tmp_path / f"result.json.{rank}").read_text())
        assert result == {"num_wrong": 0, "counts_right": True, "times_plausible": True}
