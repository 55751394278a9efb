"""``lancet estimate`` as a shell sees it: a launch script of the examples, its figures, refusals."""

import json

import pytest

from tests.ranks import launch

TOOL = launch.REPO / "tools" / "estimate.py"
EXAMPLE = launch.REPO / "examples" / "qwen3_30b_a3b.sh"
pytestmark = pytest.mark.distributed


def run(arguments, log_dir) -> launch.RankResult:
    (result,) = launch.run(TOOL, arguments, 1, log_dir, timeout_s=180)
    return result


def test_estimate_of_an_example_has_ranges_and_a_file(tmp_path):
    file = tmp_path / "figures.json"
    result = run([EXAMPLE, "--cluster", "4x8:h100,nvlink,400g", "--trust-script", "--json", file], tmp_path)
    assert result.returncode == 0, result.output
    assert "30.53 billion" in result.output
    assert "32 = TP 1 x CP 1 x PP 1 x DP 32" in result.output
    assert "stock's recompute repeats the all-to-alls of the forward; a plan keeps their rows" in result.output
    figures = json.loads(file.read_text())
    assert {"stock", "one chunk", "pairs", "two chunks", "four chunks"} < set(figures["plans"])
    for plan in figures["plans"].values():
        for name in ("step_ms", "speedup", "memory_bytes"):
            low, high = plan[name]
            assert 0 < low <= high
    low, high = figures["plans"]["two chunks"]["speedup"]
    assert low > 1.2  # half of its messages cross nodes, and little is computed


def test_estimate_refuses_in_one_line(tmp_path):
    result = run([EXAMPLE], tmp_path)
    assert result.returncode == 2
    line = "error: --cluster is missing: pass NODESxGPUS:GPU,INTRA,INTER, for example 32x8:h100,nvlink,400g."
    assert result.output.splitlines()[-1] == line
