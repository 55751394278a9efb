from pathlib import Path

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.distributed


def test_transport_delivers_rows_of_any_size_and_skew(tmp_path):
    worker = Path(__file__).with_name("transport_worker.py")
    for result in launch.results_of(worker, 3, tmp_path, timeout_s=90):
        assert result == {"num_wrong": 0, "counts_right": True, "times_plausible": True}
