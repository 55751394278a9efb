"""The check on a GPU from its command line: limits, what is saved when, one page, wheels, and what it refuses."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu.check import driver
from benchmarks.gpu.check.driver import Check, run_limited
from benchmarks.gpu.check.parts import PARTS, TOTAL_LIMIT_S, Part, turns
from benchmarks.gpu.check.predict.file import committed, hash_of
from benchmarks.gpu.record import Recorder, read_records
from benchmarks.harness import machine_speed
from tests.cli.loading import REPOSITORY as REPO
from tests.cli.loading import TOOLS, load_tool

TOOL = TOOLS / "check_gpu.py"


@pytest.fixture(scope="module")
def tool():
    return load_tool("check_gpu")


def run_tool(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, TOOL, *map(str, words)], env=environment, capture_output=True, text=True, timeout=200
    )


def part_that_runs(code: str, monkeypatch) -> None:
    """Replaces the module of all parts by Python code, with the part's name in argv[1] and its file in argv[2]."""
    stock = driver.run_limited

    def limited(command, *args):
        at = command.index("-m")
        return stock([command[0], "-c", code, *command[at + 2 :]], *args)

    monkeypatch.setattr(driver, "run_limited", limited)


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    monkeypatch.setattr(driver, "_REHEARSAL_FACTOR", 1)
    monkeypatch.setattr(driver, "_LEAST_S", 1.0)
    monkeypatch.setattr(machine_speed, "measured", lambda: machine_speed.Speed(1.0, 1.0))  # takes seconds


def check_in(folder: Path, limit_s: float = 60, is_rehearsal: bool = True) -> Check:
    return Check(folder, is_rehearsal, "H100", {**os.environ}, limit_s=limit_s)


SAVES = """
import json, sys, time
name, file = sys.argv[1:3]
with open(file, "w") as lines:
    lines.write(json.dumps({"name": "first"}) + "\\n")
    if name == "failing":
        lines.write(json.dumps({"name": "second", "error": "ValueError: no"}) + "\\n")
        lines.flush()
        sys.exit(1)
    lines.write('{"name": "cut o')
    lines.flush()
    if name == "hanging":
        time.sleep(60)
"""


def test_each_part_saves_as_it_goes_and_stops_no_other(tmp_path, monkeypatch, capsys):
    part_that_runs(SAVES, monkeypatch)
    parts = [Part("failing", "a", 30), Part("hanging", "b", 6), Part("fine", "c", 30)]
    assert not check_in(tmp_path).run(parts)
    result = json.loads((tmp_path / "gpu-check.json").read_text())
    failing, hanging, fine = result["parts"]
    assert (failing["status"], hanging["status"], fine["status"]) == (1, None, 0)
    assert hanging["why"] == "stopped at its limit of 6 s"
    assert [len(part["records"]) for part in result["parts"]] == [2, 1, 1]  # a line that was cut off is none
    page = (tmp_path / "gpu-check.md").read_text()
    assert "- `failing` second: ValueError: no" in page
    assert "A rehearsal on the virtual GPU" in page
    printed = capsys.readouterr().out
    assert printed.index(f"SHA-256 {hash_of(committed('H100'))}") < printed.index("failing: a")


MEETS = """
import pathlib, sys, time
name, file = sys.argv[1:3]
folder = pathlib.Path(file).parent
(folder / f"{name}.here").touch()
other = {"left": "right", "right": "left"}.get(name, name)
while not (folder / f"{other}.here").exists():
    time.sleep(0.05)
"""


def test_parts_without_times_run_beside_each_other(tmp_path, monkeypatch):
    """Each of the two waits for the other one."""
    part_that_runs(MEETS, monkeypatch)
    parts = [Part("alone", "a", 20, has_times=True), Part("left", "b", 20), Part("right", "c", 20)]
    assert turns(parts) == [parts[:1], parts[1:]]
    assert check_in(tmp_path, is_rehearsal=False).run(parts)
    assert [part["status"] for part in json.loads((tmp_path / "gpu-check.json").read_text())["parts"]] == [0, 0, 0]


def test_parts_of_a_turn_end_when_the_check_fails(tmp_path, monkeypatch):
    part_that_runs("import time; time.sleep(60)", monkeypatch)
    check, stock = check_in(tmp_path, is_rehearsal=False), driver.run_limited

    def limited(command, *args):
        while "right" in command and not check._processes:
            time.sleep(0.05)
        if "right" in command:
            raise OSError("no process")
        return stock(command, *args)

    monkeypatch.setattr(driver, "run_limited", limited)
    with pytest.raises(OSError, match="no process"):
        check.run([Part("left", "b", 50), Part("right", "c", 50)])
    (left,) = check._processes
    assert left.poll() is not None


def test_a_part_does_not_begin_when_the_time_of_the_whole_is_up(tmp_path, monkeypatch):
    part_that_runs(SAVES, monkeypatch)
    assert not check_in(tmp_path, limit_s=8).run([Part("hanging", "a", 60), Part("fine", "b", 30)])
    hanging, late = json.loads((tmp_path / "gpu-check.json").read_text())["parts"]
    assert hanging["why"].startswith("stopped at its limit of")
    assert late["status"] is None
    assert late["why"].startswith("not begun")


def test_children_of_a_part_end_with_it(tmp_path):
    code = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); import time; time.sleep(60)"
    )
    log = tmp_path / "log"
    assert run_limited([sys.executable, "-c", code], log, 6, os.environ)[0] is None
    child = int(log.read_text().split()[0])
    for _ in range(50):
        if not Path(f"/proc/{child}/status").exists() or "Z (zombie)" in Path(f"/proc/{child}/status").read_text():
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} still runs")


def test_parts_end_within_ten_minutes_and_have_modules():
    assert TOTAL_LIMIT_S < 600
    assert sum(max(part.limit_s for part in turn) for turn in turns(PARTS)) <= TOTAL_LIMIT_S
    for part in PARTS:
        assert importlib.util.find_spec(f"benchmarks.gpu.check.part.{part.name}") is not None


def test_what_was_measured_is_kept_when_check_itself_is_ended(tmp_path):
    words = [sys.executable, str(TOOL), str(tmp_path), "--rehearse", "--parts", "machine", "gradients"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for line in process.stdout:
        if line.startswith("gradients"):
            process.send_signal(signal.SIGTERM)
            break
    assert process.wait(100) == 128 + signal.SIGTERM
    (machine,) = json.loads((tmp_path / "gpu-check.json").read_text())["parts"]
    assert {record["name"] for record in machine["records"]} == {"versions", "packages", "devices"}


def test_records_are_on_the_disk_at_once_and_errors_are_counted(tmp_path):
    record = Recorder(tmp_path / "part.jsonl", limit_s=100)
    record.add("a", ms=1.5)
    with record.guarded("b", variant="x"):
        raise ValueError("no")
    first, second = read_records(tmp_path / "part.jsonl")
    assert first == {"name": "a", "ms": 1.5}
    assert (second["variant"], second["error"]) == ("x", "ValueError: no")
    assert "raise ValueError" in second["frames"]
    assert record.num_errors == 1
    assert 90 < record.time_left_s() <= 100
    assert read_records(tmp_path / "missing.jsonl") == []


def test_missing_packages_come_from_the_wheels(tool, tmp_path, monkeypatch):
    """pip itself, too: the wheel of pip that runs is made of the one that is installed here."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    pip = Path(importlib.util.find_spec("pip").origin).parent
    with zipfile.ZipFile(wheels / "pip-1-py3-none-any.whl", "w") as archive:
        for file in pip.rglob("*.py"):
            archive.write(file, Path("pip") / file.relative_to(pip))
        for file in pip.rglob("*.pem"):
            archive.write(file, Path("pip") / file.relative_to(pip))
        for file in pip.rglob("*.txt"):
            archive.write(file, Path("pip") / file.relative_to(pip))
    with zipfile.ZipFile(wheels / "carried_thing-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("carried_thing.py", "VALUE = 7\n")
        archive.writestr(
            "carried_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried-thing\nVersion: 1.0\n"
        )
        archive.writestr(
            "carried_thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("carried_thing-1.0.dist-info/RECORD", "")
    (wheels / "origin.json").write_text('{"commit": "abc"}')
    monkeypatch.setattr(tool, "NEEDED", {"carried_thing": "carried-thing", "numpy": "numpy"})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "/before")
    assert tool.make_importable(tmp_path / "site", wheels) == "abc"
    found = subprocess.run(
        [sys.executable, "-c", "import carried_thing; print(carried_thing.VALUE)"], capture_output=True, text=True
    )
    assert found.stdout == "7\n"
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "site"), str(REPO), "/before"]
    assert not (tmp_path / "site" / "numpy").exists()  # this Python has it


def test_missing_packages_without_wheels_are_refused(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "NEEDED", {"no_such_module.inner": "no-such-package"})
    with pytest.raises(tool._UsageError, match=r"lacks no-such-package, and .* has no wheels"):
        tool.make_importable(tmp_path / "site", tmp_path / "wheels")


def test_pinned_versions_are_fetched(tool):
    pinned = dict(one.split("==") for one in tool._pinned())
    assert set(pinned) == set(tool.NEEDED.values())
    assert pinned["megatron-core"].startswith("0.19")


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["results"], {}, "finds none. Pass --rehearse"),
        ([], {}, "expected a folder for the results"),
        (["results", "--rehearse", "--parts", "nothing"], {}, "--parts nothing: expected some of machine"),
        (["results", "--rehearse"], {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS is 1"),
        (["results", "--rehearse", "--device", "abacus"], {}, "--device abacus: expected H100 or H200"),
    ],
)
def test_what_it_refuses(words, variables, message, tmp_path):
    words = [tmp_path / word if word == "results" else word for word in words]
    done = run_tool(*words, **variables)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_wheels_stay_where_their_versions_are_unknown(tmp_path):
    """An installed package has the tool and no list of versions."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/old.whl").touch()
    installed = tmp_path / "tools/check_gpu.py"
    installed.write_text(TOOL.read_text())
    command = [sys.executable, installed, "--carry", tmp_path / "wheels"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "needs a checkout of the project" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "wheels/old.whl").exists()
