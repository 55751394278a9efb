"""Choice of the quoted network measurement, on made-up result files."""

import dataclasses
import json
from typing import Any

import pytest

from benchmarks.network.cases import CASES, VARIANTS
from benchmarks.quoted import network as quoted_network
from benchmarks.quoted import results as quoted_results
from benchmarks.quoted import tables as quoted
from benchmarks.quoted import targets
from benchmarks.training_step.sample import SAMPLE_FIELDS

DEFAULT = {"MALLOC_TRIM_THRESHOLD_": "8589934592"}
STEP_MS = 100.0


def made_up(name: str, speedups: dict[str, float], disturbed: bool = False, **changed: Any) -> dict[str, Any]:
    """Returns a case of a result file whose variants have these speed-ups."""
    step_ms = {"stock": STEP_MS, "stock-free": STEP_MS, **{one: STEP_MS / found for one, found in speedups.items()}}
    values = {**dict.fromkeys(SAMPLE_FIELDS, 1.0), "forward_ms": 40.0, "backward_ms": 60.0}
    samples = {one: [[list({**values, "step_ms": ms}.values())] * 2] * 2 for one, ms in step_ms.items()}
    return {
        **dataclasses.asdict(CASES[name]),
        "variants": list(step_ms),
        "plans": {one: VARIANTS[one].schedule for one in step_ms},
        "rate_bps": 1e9,
        "expert_shares": [[0.25] * 4],
        "peak_activation_bytes": {one: [100, 100] for one in step_ms},
        "sample_fields": SAMPLE_FIELDS,
        "sweeps": [{"samples": samples, "disturbance": {"is_disturbed": disturbed}}],
        **changed,
    }


@pytest.fixture
def commit(tmp_path, monkeypatch):
    """Writes a result file and clears the cache of read files."""
    monkeypatch.setattr(quoted_results, "_RESULTS", tmp_path)

    def forget() -> None:
        quoted_results.all_runs.cache_clear()
        quoted_network._runs.cache_clear()

    def write(date: str, *cases: dict[str, Any], name: str = "network", **origin: Any) -> None:
        found = {"date": date, "command": "python -m benchmarks.network", "settings": DEFAULT, **origin}
        (tmp_path / f"{name}-{date}.json").write_text(json.dumps({**found, "cases": cases}))
        forget()

    forget()
    yield write
    forget()


def test_newest_run_of_a_case_counts(commit):
    commit("2026-01-01", made_up("45", {"all-k2": 1.6, "all-k4": 1.7}))
    commit("2026-01-03", made_up("45-tiles", {"all-k2": 1.5}), name="network-tiles")
    commit("2026-01-02", made_up("45", {"all-k2": 1.4}), name="network-again")
    case = quoted_network.network()["45"]
    assert [row.speedup.median for row in case.rows("all-k2")] == pytest.approx([1.5, 1.4, 1.6])
    assert case.cell("all-k2", "costs") == "1.50 (costs), 1.40 to 1.60 in 3 runs"
    assert case.cell("all-k4", "costs") == "1.70 (costs)", "the newest run that has the variant"
    table = quoted.speed()
    assert "| `45` | forward and backward | " in table
    assert table.index("[2026-01-03](") < table.index("[2026-01-02](") < table.index("[2026-01-01](")


def test_what_is_not_comparable_is_not_quoted(commit):
    commit("2026-01-01", made_up("45", {"all-k2": 1.6}))
    shape = dataclasses.asdict(dataclasses.replace(CASES["45"].shape, layers=2))
    others = [
        made_up("45", {"all-k2": 9.0}, shape=shape),
        made_up("45", {"all-k2": 9.0}, exposed_share=0.5),
        made_up("45", {"all-k2": 9.0}, optimizer=True),
        made_up("45", {"all-k2": 9.0}, ranks_per_node=2),
        made_up("45", {"all-k2": 9.0}, baseline="stock-free"),
    ]
    commit("2026-01-02", *others)
    commit("2026-01-03", made_up("45", {"all-k2": 9.0}), command="python -m benchmarks.network --rate 100")
    commit("2026-01-06", made_up("45", {"all-k2": 9.0}), command="python -m benchmarks.network --rate=100")
    commit("2026-01-04", made_up("45", {"all-k2": 9.0}), settings={"OMP_NUM_THREADS": "1"})
    another_plan = made_up("45", {"all-k2": 9.0})
    another_plan["plans"]["all-k2"] = VARIANTS["all-k4"].schedule
    commit("2026-01-05", another_plan)
    (row,) = quoted_network.network()["45"].rows("all-k2")
    assert row.speedup.median == pytest.approx(1.6)
    assert "forward, backward, gradient reduction and Adam" in quoted.speed(), "the optimizer makes it a different case"


def test_files_older_than_a_setting_had_its_default(commit):
    old = made_up("45", {"all-k2": 1.6})
    del old["ranks_per_node"], old["shape"]["zipf"], old["shape"]["te"]
    commit("2026-01-01", old, settings=None)
    assert quoted_network.network()["45"].row("all-k2").speedup.median == pytest.approx(1.6)


def test_a_disturbed_run_counts_with_its_mark(commit):
    commit("2026-01-01", made_up("45", {"all-k2": 1.6, "all-k4": 1.7}))
    commit("2026-01-02", made_up("45", {"all-k2": 1.5}, disturbed=True))
    case = quoted_network.network()["45"]
    assert case.cell("all-k2", "costs") == "1.50 (costs), 1.50 to 1.60 in 2 runs DISTURBED"
    assert case.cell("all-k4", "costs") == "1.70 (costs)"


def test_files_and_commands_are_named_with_what_they_say_of_code(commit):
    commit("2026-01-01", made_up("45", {"all-k2": 1.6}))
    commit("2026-01-02", made_up("20", {"all-k2": 1.1}), commit="0123456789", is_dirty=True, command="the command")
    assert quoted.speed().splitlines()[-1] == (
        "Made from [network-2026-01-01.json](results/network-2026-01-01.json), 2026-01-01, commit not recorded: "
        "`python -m benchmarks.network`; [network-2026-01-02.json](results/network-2026-01-02.json), 2026-01-02, "
        "commit 0123456 with uncommitted changes: `the command`."
    )


def test_speed_with_pairs_is_quoted_with_its_memory(commit):
    found = made_up("45-m4", {"megatron-overlap": 1.3, "paired-k1": 1.5})
    found["peak_activation_bytes"]["paired-k1"] = [140, 150]
    commit("2026-01-01", found)
    head, _, line, *_ = quoted.pairing().splitlines()
    assert head.startswith("| case, forward and backward | ")
    cells = dict(zip(head.split(" | "), line.split(" | "), strict=True))
    assert cells["`megatron-overlap`, emulated"].startswith("1.30 (bound ")
    assert cells["`paired-k1`"].endswith(", memory 1.50)")


def test_target_of_pairs_counts_the_fastest_plan_of_all_runs(commit):
    commit("2026-01-01", made_up("45-m4", {"paired-k1": 1.4, "paired-mix": 1.6}))
    commit("2026-01-02", made_up("45-m4", {"paired-k1": 1.5}, disturbed=True))
    commit("2026-01-03", made_up("45-m8", {"all-k2": 1.5}))
    bounds, _, memory = targets._pairs()
    assert bounds[1:3] == ["1 of 1", "`45-m4` `paired-mix` (target 1.10) " + bounds[2].split()[-1]]
    assert memory == ["pairs: activation memory at most 1.15 of stock's", "0 of 2", "", "1.00 DISTURBED"]


def test_spread_of_few_repeats_is_headed_as_a_range(commit):
    found = made_up("45-tiles", {"all-k2": 1.5, "tiles-1-half": 1.3})
    commit("2026-01-01", found)
    assert "| speed-up (range) |" in quoted.TABLES["tiles-variants"]()
    found["sweeps"] *= 2
    commit("2026-01-01", found)
    assert "| speed-up (quartiles) |" in quoted.TABLES["tiles-variants"]()
