"""The benchmark of evaluation on a real, small network: equal losses, bytes that replicas save, and what it writes."""

import json

import pytest

from tests.cli.benchmarks.runs import run_bench

TINY = ["--layers", "1", "--hidden", "64", "--seq-length", "32", "--repeats", "3", "--sweeps", "1", "--rate", "100"]


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.alone
@pytest.mark.usefixtures("shaped_network")
def test_a_small_run_has_equal_losses_and_fewer_bytes(tmp_path):
    chosen = ["--cases", "45", "--variants", "replicas-8", "tiles-1", "--output", str(tmp_path / "run")]
    output, _ = run_bench("evaluation", *TINY, *chosen)
    assert "batch ms, median" in output
    result = json.loads((tmp_path / "run.json").read_text())
    (case,) = result["cases"]
    assert case["variants"] == ["none", "replicas-8", "tiles-1"]
    assert case["expected"]["none"]["most_over_mean"] > 1.3 > case["expected"]["replicas-8"]["most_over_mean"]
    (sweep,) = case["sweeps"]
    assert sweep["largest_loss_error"] < 2e-6
    sent = {
        variant: sum(rank[case["sample_fields"].index("payload_bytes")] for ranks in batches for rank in ranks)
        for variant, batches in sweep["samples"].items()
    }
    assert all(len(batches) == 3 for batches in sweep["samples"].values())
    assert 0 < sent["replicas-8"] < 0.6 * sent["none"]
    # Of 64 values and a probability a dispatch of ours makes a multiple of 16 bytes.
    assert sent["tiles-1"] / sent["none"] == (64 * 4 + 16 + 64 * 4) / (64 * 4 + 4 + 64 * 4)
    assert "| replicas-8 |" in (tmp_path / "run.md").read_text()


def test_an_unknown_number_of_replicas_is_refused():
    from benchmarks.evaluation.cases import choose
    from megatron_lancet.errors import UsageError

    with pytest.raises(UsageError, match=r"no variant replicas-3\. Known: none, replicas-2"):
        choose([], ["replicas-3"])
