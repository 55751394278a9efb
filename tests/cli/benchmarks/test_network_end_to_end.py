"""The network benchmark on a real, small network: what it writes, and that nothing of it stays."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cli.benchmarks.runs import REPO, TINY, namespaces, processes_of
from tests.gradient_deviations import TOLERANCE

START_LIMIT_S = 60
pytestmark = pytest.mark.usefixtures("shaped_network")


@contextmanager
def started(*args: str) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "benchmarks.network", *TINY, "--sweeps", "1", *args]
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def host_links() -> str:
    return subprocess.run(["ip", "-oneline", "link"], capture_output=True, text=True, check=True).stdout


def own_namespaces(process: subprocess.Popen) -> list[str]:
    return [f"lancet-{process.pid}-{rank}" for rank in range(2)]


def wait_for_ranks(process: subprocess.Popen, folder: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while len(processes_of(f"{folder}/lancet-network-")) < 2:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.mark.distributed
@pytest.mark.alone
def test_a_small_run_measures_its_variants_and_leaves_nothing(tmp_path, check_gradients):
    before = host_links()
    variants = ["--variants", "all-k2", "forward-only-k2", "sequence-k2", "dedup-k1"]
    with started("--cases", "45-top4", *variants, "--output", str(tmp_path / "run")) as process:
        output, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    assert "balanced top-4" in output
    result = json.loads((tmp_path / "run.json").read_text())
    (case,) = result["cases"]
    assert case["variants"][0] == "stock"
    assert {"all-k2", "forward-only-k2", "sequence-k2", "dedup-k1", "stock-sdpa", "stock-free"} <= set(case["variants"])
    assert case["rate_bps"] == 1e8
    for variant in ("all-k2", "dedup-k1"):
        error = case["largest_errors"][variant]
        assert error > 0, "it sums in another order"
        check_gradients({f"the worst one of {variant}": error}, TOLERANCE)
    (sweep,) = case["sweeps"]
    for variant in case["variants"]:
        for ranks in sweep["samples"][variant]:
            samples = [dict(zip(case["sample_fields"], rank, strict=True)) for rank in ranks]
            assert len(samples) == 2
            assert all(sample["payload_bytes"] > 0 and sample["step_ms"] > 0 for sample in samples)
    check_bytes(case, "stock", case["sent_rows"]["plain"], 4)
    check_bytes(case, "dedup-k1", case["sent_rows"]["dedup"], 32)
    assert 1.9 < case["sent_rows"]["plain"] / case["sent_rows"]["dedup"] < 2.1
    assert "| all-k2 |" in (tmp_path / "run.md").read_text()
    assert "\n\nSpeed of one thread: a GEMM with " in (tmp_path / "run.md").read_text()
    assert (tmp_path / "run.png").stat().st_size > 1000
    check_origin(result)
    assert host_links() == before
    assert set(own_namespaces(process)).isdisjoint(namespaces())


def check_bytes(case: dict, variant: str, num_rows: int, choice_bytes: int) -> None:
    """Rows that the routing sends away travel in a dispatch and a combine, forward and backward.

    Args:
        choice_bytes: of what a row of a dispatch has next to 64 hidden values in 32 bits: its probabilities, without
            duplicates also the choice of experts, in parts of 16 bytes.
    """
    due = 2 * num_rows * (2 * 64 * 4 + choice_bytes)
    payload, wire = (case["sample_fields"].index(field) for field in ("payload_bytes", "wire_bytes"))
    for ranks in case["sweeps"][0]["samples"][variant]:
        assert sum(rank[payload] for rank in ranks) == due
        assert due < sum(rank[wire] for rank in ranks[:: case["ranks_per_node"]]) < 2 * due


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.alone
def test_dispatch_decides_how_often_a_token_is_sent_to_a_node(tmp_path, check_gradients):
    """Two ranks of a node share its interface, on which only rows for the other node count."""
    variants = ["--variants", "dedup-k2", "two-hop-k1"]
    with started("--cases", "nodes-top4", *variants, "--output", str(tmp_path / "run")) as process:
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    (case,) = json.loads((tmp_path / "run.json").read_text())["cases"]
    assert case["variants"] == ["stock", "stock-free", "dedup-k2", "two-hop-k1"]
    check_gradients({name: case["largest_errors"][name] for name in ("dedup-k2", "two-hop-k1")}, TOLERANCE)
    sent = case["sent_rows"]
    assert 1.9 < sent["plain"] / sent["tokens"] < 2.1
    assert 0.9 < sent["two_hop"] / sent["tokens"] < 1.0 < sent["dedup"] / sent["tokens"] < 1.7
    check_bytes(case, "stock", sent["plain"], 4)
    check_bytes(case, "dedup-k2", sent["dedup"], 16)
    check_bytes(case, "two-hop-k1", sent["two_hop"], 32)
    for ranks in case["sweeps"][0]["samples"]["two-hop-k1"]:
        wire = [rank[case["sample_fields"].index("wire_bytes")] for rank in ranks]
        # Both ranks of a node read its counter, one after the other: acknowledgements may leave in between.
        assert (wire[0], wire[2]) == pytest.approx((wire[1], wire[3]), rel=0.01)
    assert "if it goes once to a node" in (tmp_path / "run.md").read_text()
    assert set(own_namespaces(process)).isdisjoint(namespaces())


def check_origin(result: dict) -> None:
    """The file says by itself where its figures come from."""
    git = ["git", "-c", f"safe.directory={REPO}", "rev-parse", "HEAD"]
    commit = subprocess.run(git, cwd=REPO, capture_output=True, text=True, check=False).stdout.strip() or None
    assert result["commit"] == commit
    assert result["is_dirty"] in ((None,) if commit is None else (True, False))
    assert result["command"].startswith("python -m benchmarks.network --layers 1 ")
    assert result["versions"]["torch"] == version("torch")
    assert result["settings"]["MALLOC_TRIM_THRESHOLD_"] == str(8 << 30)
    assert result["is_complete"] is True
    assert result["machine_speed"]["gemm_gflops_before"] > 0 < result["machine_speed"]["gemm_gflops_after"]


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.alone
def test_megatrons_own_overlap_has_stocks_gradients_and_bytes(tmp_path):
    with started("--layers", "2", "--cases", "45-accumulated", "--output", str(tmp_path / "run")) as process:
        _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    (case,) = json.loads((tmp_path / "run.json").read_text())["cases"]
    assert case["variants"] == ["stock", "megatron-overlap", "all-k2", "all-k4", "stock-free"]
    assert case["largest_errors"]["megatron-overlap"] == 0
    fields = case["sample_fields"]
    sent = {
        name: {rank[fields.index("payload_bytes")] for ranks in steps for rank in ranks}
        for name, steps in case["sweeps"][0]["samples"].items()
    }
    assert sent["megatron-overlap"] == sent["stock"]
    assert all(rank[fields.index("forward_ms")] == 0 for rank in case["sweeps"][0]["samples"]["stock"][0])
    assert (tmp_path / "run.md").read_text().startswith("`python -m benchmarks.network --layers 1")


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.alone
def test_megatrons_delayed_weight_gradients_are_stocks(tmp_path):
    variants = ["--variants", "megatron-overlap-delay-wgrad", "all-k2"]
    with started("--cases", "45-te-m4", *variants, "--output", str(tmp_path / "run")) as process:
        _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    (case,) = json.loads((tmp_path / "run.json").read_text())["cases"]
    assert case["variants"] == ["stock", "megatron-overlap-delay-wgrad", "all-k2", "stock-free"]
    assert case["largest_errors"]["megatron-overlap-delay-wgrad"] == 0 < case["largest_errors"]["all-k2"]
    assert case["plans"]["megatron-overlap-delay-wgrad"] == "Megatron's overlap, two streams emulated, dW apart"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("moment", "number", "status"),
    [("starting", signal.SIGINT, 130), ("measuring", signal.SIGTERM, 143)],
)
def test_an_interrupt_takes_the_namespaces_and_the_ranks_with_it(moment, number, status, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the ranks' command lines name it
    before = host_links()
    with started("--cases", "45", "--repeats", "1000", "--output", str(tmp_path / "run")) as process:
        if moment == "measuring":
            assert any("prepared in" in line for line in process.stdout), process.stderr.read()
        else:
            wait_for_ranks(process, tmp_path)
        assert set(own_namespaces(process)) <= namespaces()
        assert len(processes_of(f"{tmp_path}/lancet-network-")) == 2
        assert host_links() == before, "the links are inside"
        process.send_signal(number)
        assert process.wait(60) == status
    assert set(own_namespaces(process)).isdisjoint(namespaces())
    assert processes_of(f"{tmp_path}/lancet-network-") == []
    assert not (tmp_path / "run.json").exists()
