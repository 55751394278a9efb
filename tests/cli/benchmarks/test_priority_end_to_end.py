"""The benchmark of priorities on a real, small network: same gradients, same bytes, and what it writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gradient_deviations import TOLERANCE

REPO = Path(__file__).parents[3]
TINY = ["--layers", "1", "--hidden", "64", "--seq-length", "32", "--repeats", "2", "--sweeps", "1", "--rate", "100"]
VARIANTS = ["megatron", "megatron-overlap", "ours-no-priority", "ours", "compute"]


@pytest.mark.distributed
@pytest.mark.alone
@pytest.mark.usefixtures("shaped_network")
def test_small_run_reduces_same_gradients_over_same_link(tmp_path, check_gradients):
    chosen = ["--cases", "40", "--variants", *VARIANTS[1:4], "--output", str(tmp_path / "run")]
    command = [sys.executable, "-m", "benchmarks.priority", *TINY, *chosen]
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "against megatron-overlap" in output
    result = json.loads((tmp_path / "run.json").read_text())
    (case,) = result["cases"]
    assert case["variants"] == VARIANTS
    assert case["largest_errors"]["megatron-overlap"] == 0.0
    error = case["largest_errors"]["ours"]
    assert error > 0, "chunks sum in another order"
    check_gradients({"the worst one": error}, TOLERANCE)
    (sweep,) = case["sweeps"]
    for variant in VARIANTS[:-1]:
        for ranks in sweep["samples"][variant]:
            for rank in ranks:
                sample = dict(zip(case["sample_fields"], rank, strict=True))
                due = sample["payload_bytes"] + sample["reduced_bytes"]
                assert sample["payload_bytes"] > 0
                assert sample["reduced_bytes"] > 0
                assert due <= sample["wire_bytes"] <= 1.02 * due + 50_000
    assert "| ours |" in (tmp_path / "run.md").read_text()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"lancet-{process.pid}-" not in listed


def test_an_unknown_variant_is_refused():
    from benchmarks.priority.cases import choose
    from megatron_lancet.errors import UsageError

    with pytest.raises(UsageError, match=r"no variant ours-2x\. Known: megatron, megatron-overlap"):
        choose([], ["ours-2x"])
