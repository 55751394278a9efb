"""The benchmark of priorities on a real, small network: same gradients, same bytes, and what it writes."""

import pytest

from tests.cli.benchmarks.runs import run_on_network
from tests.gradient_deviations import TOLERANCE

VARIANTS = ["megatron", "megatron-overlap", "ours-no-priority", "ours", "compute"]


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.alone
@pytest.mark.usefixtures("shaped_network")
def test_small_run_reduces_same_gradients_over_same_link(tmp_path, check_gradients):
    chosen = ["--cases", "40", "--variants", *VARIANTS[1:4], "--sweeps", "1"]
    output, result, tables = run_on_network("priority", tmp_path, *chosen)
    assert "against megatron-overlap" in output
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
    assert "| ours |" in tables


def test_an_unknown_variant_is_refused():
    from benchmarks.priority.cases import choose
    from megatron_lancet.errors import UsageError

    with pytest.raises(UsageError, match=r"no variant ours-2x\. Known: megatron, megatron-overlap"):
        choose([], ["ours-2x"])
