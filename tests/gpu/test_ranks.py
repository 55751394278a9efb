"""The check's part with several ranks: over NCCL on one device or several; in the ordinary suite over gloo."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.check.part import ranks
from benchmarks.gpu.check.place import rehearsal
from benchmarks.gpu.check.rank import launch
from benchmarks.gpu.check.rank.gradients import CASES, TOLERANCE, num_messages, title_of
from benchmarks.gpu.check.rank.merge import OtherOrderError, merged
from benchmarks.gpu.check.rank.timing import TIMED
from benchmarks.gpu.record import Recorder, read_records
from megatron_lancet.training.platform.cpu import gpu_available
from tests.gpu.damaged_rank import CASE
from tests.ranks.launch import REPO, preloaded

RANK = REPO / "benchmarks/gpu/check/rank/__main__.py"
DAMAGED = Path(__file__).with_name("damaged_rank.py")
FEW = {name: CASES[name] for name in ("ours k=1", CASE, "pairs")}


def over_nccl(folder: Path) -> list[dict]:
    if not gpu_available():
        pytest.skip("needs a CUDA device")
    file = folder / "ranks.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu.check", "ranks", str(file), "--limit", "200"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=220)
    assert done.returncode in (0, 1), done.stderr[-4000:]
    return read_records(file)


def over_gloo(folder: Path, limit_s: float = 120) -> list[dict]:
    record = Recorder(folder / "ranks.jsonl", limit_s)
    with rehearsal() as place:
        ranks.run(record, place)
    found = read_records(folder / "ranks.jsonl")
    assert record.num_errors == sum("error" in one for one in found)
    return found


def fork_ranks(monkeypatch, script=RANK, *words, timing=True):
    """Lets ranks be forked: imports take longer than most tests. Returns the list in which they will be."""
    if gpu_available():
        pytest.skip("make test runs it over gloo, where no device is seen")
    processes = []

    def forked(arguments, environment, log):
        log.write_text("")
        command = [str(script), *words, *(one for one in arguments if timing or one != "--timing")]
        processes.append(preloaded().start(command, environment, log, REPO))
        return processes[-1]

    monkeypatch.setattr(launch, "start_process", forked)
    return processes


@pytest.fixture(scope="module", params=[pytest.param("nccl", marks=pytest.mark.gpu), "gloo"])
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    if request.param == "nccl":
        return over_nccl(folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        processes = fork_ranks(monkeypatch)
        found = over_gloo(folder)
    assert [process.poll() for process in processes] == [0, 0]
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_ranks_equal_stock(results, case):
    (found,) = [one for one in results if one["name"] == title_of(case)]
    assert "error" not in found, found
    assert found["error_vs_stock"] <= TOLERANCE
    if CASES[case].replicas == 1:
        assert found["messages"] == num_messages(CASES[case].last_plan)


@pytest.mark.distributed
def test_setting_says_what_the_ranks_are(results):
    ranks_are, setting = results[:2]
    assert (ranks_are["name"], setting["name"]) == ("ranks", "setting")
    assert ranks_are["ranks"] == setting["ranks"] >= 2
    assert ranks_are["shares_device"] == (torch.cuda.device_count() == 1)
    assert (setting["backend"] == "nccl") == (setting["nccl"] is not None) == gpu_available()


@pytest.mark.distributed
def test_ranks_with_devices_of_their_own_are_timed(results):
    if results[0]["shares_device"]:
        assert not [one for one in results if one["name"] in ("step", "steps", "all-to-all")]
        return
    left_out = {one["what"] for one in results if one["name"] == "left out"}
    steps = {one["variant"]: one for one in results if one["name"] == "steps"}
    assert {*steps, *left_out} >= set(TIMED)
    assert all(one["median_ms"] > 0 and one["rounds"] >= 1 for one in steps.values())
    assert all(one["gbytes_per_s"] > 0 for one in results if one["name"] == "all-to-all")
    single = [one for one in results if one["name"] == "step"]
    assert all(one["ms"] == max(one.get("ms_of_ranks", [one["ms"]])) for one in single)
    assert len(single) == sum(one["rounds"] for one in steps.values())


def gone(processes) -> bool:
    return all(process.poll() is not None for process in processes)


def damaged(monkeypatch, folder: Path, damage: str) -> tuple[list[dict], list]:
    monkeypatch.setattr(ranks, "CASES", FEW)
    monkeypatch.setattr(ranks, "CASE_LIMIT_S", 12.0)
    monkeypatch.setattr(ranks, "_LEAST_RESTART_S", 1.0)
    processes = fork_ranks(monkeypatch, DAMAGED, damage, timing=False)
    return over_gloo(folder), processes


@pytest.mark.distributed
def test_wrong_gradient_on_a_rank_is_an_error(monkeypatch, tmp_path):
    found, processes = damaged(monkeypatch, tmp_path, "wrong gradient")
    (error,) = [one for one in found if "error" in one]
    assert (error["name"], error["rank"]) == (title_of(CASE), 1)
    assert "of its norm away from stock's" in error["error"]
    assert len(processes) == 2
    assert {title_of(name) for name in FEW} <= {one["name"] for one in found}


@pytest.mark.distributed
def test_ranks_that_hang_say_where_they_stand(monkeypatch, tmp_path):
    start_s = time.monotonic()
    found, processes = damaged(monkeypatch, tmp_path, "hang")
    errors = [one for one in found if "error" in one]
    assert {(one["name"], one["rank"]) for one in errors} == {(title_of(CASE), 0), (title_of(CASE), 1)}
    of_rank_0, of_rank_1 = sorted(errors, key=lambda error: error["rank"])
    assert re.search(r"stands here: .*L\d+\.c\d", of_rank_1["error"])
    # Both limits end in the same moment. If rank 1 ends first, rank 0's transport reports it, with the same position.
    assert re.search(r"(stands here: .*|gave up on )L\d+\.c\d", of_rank_0["error"])
    assert "damaged_rank.py" in of_rank_1["frames"]
    assert gone(processes)
    assert time.monotonic() - start_s < 100
    assert [one["name"] for one in found if one["name"].startswith("gradients pairs")] == [title_of("pairs")]


@pytest.mark.distributed
@pytest.mark.parametrize(("damage", "said"), [("crash", "about to crash"), ("error", "no memory")])
def test_a_rank_that_fails_is_an_error_and_others_run_the_rest(monkeypatch, tmp_path, damage, said):
    found, processes = damaged(monkeypatch, tmp_path, damage)
    (of_rank_1,) = [one for one in found if one.get("rank") == 1 and "error" in one]
    assert of_rank_1["name"] == title_of(CASE)
    assert said in of_rank_1["error"] + of_rank_1["frames"]
    assert gone(processes)
    assert [one["name"] for one in found if one["name"].startswith("gradients pairs")] == [title_of("pairs")]


def test_ranks_that_cannot_start_are_errors_once(monkeypatch, tmp_path):
    def failing(arguments, environment, log):
        with log.open("wb") as file:
            return subprocess.Popen(["/bin/sh", "-c", "echo no such module; exit 5"], stdout=file)

    monkeypatch.setattr(launch, "start_process", failing)
    found = over_gloo(tmp_path)
    errors = [one for one in found if "error" in one]
    assert [one["rank"] for one in errors] == [0, 1]
    assert all(one["name"] == "setting" for one in errors)
    assert all("status 5" in one["error"] and "no such module" in one["frames"] for one in errors)


def test_a_killed_rank_leaves_no_process_behind(monkeypatch, tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nsleep 100 &\necho $! > $RANK_CHILD\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(launch.sys, "executable", str(script))
    child = tmp_path / "child"
    process = launch.start_process([], {**os.environ, "RANK_CHILD": str(child)}, tmp_path / "log")
    while not child.exists() or not child.read_text():
        time.sleep(0.01)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    assert ended(int(child.read_text()))


def ended(pid: int) -> bool:
    """Whether a process of another ends soon: it may be a zombie until its new parent asks for it."""
    status = Path(f"/proc/{pid}/stat")
    for _ in range(500):
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


def test_the_command_of_a_rank_is_that_of_its_module(tmp_path):
    process = launch.start_process(["--help"], launch.environment_of(0, 2, 1, shares_device=False), tmp_path / "log")
    assert process.wait(60) == 0
    assert "python -m benchmarks.gpu.check.rank" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("devices", "expected"), [(1, 2), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (16, 8)])
def test_ranks_share_a_device_only_if_there_is_one(devices, expected):
    layout = ranks.layout_of(devices)
    assert (layout.num_ranks, layout.shares_device) == (expected, devices == 1)


def test_ranks_on_one_device_are_on_hosts_of_their_own_for_nccl():
    shared = [launch.environment_of(rank, 2, 1, shares_device=True) for rank in range(2)]
    assert [one["LOCAL_RANK"] for one in shared] == ["0", "0"]
    assert shared[0]["NCCL_HOSTID"] != shared[1]["NCCL_HOSTID"]
    apart = [launch.environment_of(rank, 2, 1, shares_device=False) for rank in range(2)]
    assert [one["LOCAL_RANK"] for one in apart] == ["0", "1"]
    assert not any("NCCL_HOSTID" in one for one in apart)


def test_results_of_ranks_are_merged_and_other_orders_are_found():
    both = merged(
        [{"name": "a", "ms": 1.0, "n": 3, "order": ["x", "y"]}, {"name": "a", "ms": 2.0, "n": 4, "order": ["x", "y"]}]
    )
    assert both == {"name": "a", "ms": 2.0, "ms_of_ranks": [1.0, 2.0], "n": [3, 4], "launches": 2}
    with pytest.raises(OtherOrderError, match="launch 1 is y on rank 0 and z on rank 1"):
        merged([{"order": ["x", "y"]}, {"order": ["x", "z"]}])
    with pytest.raises(OtherOrderError, match="launch 1 is y on rank 0 and None on rank 1"):
        merged([{"order": ["x", "y"]}, {"order": ["x"]}])
