"""The check's part that runs a step under compute-sanitizer; here a stand-in runs the step and prints what it would."""

import json
import sys
import time

import pytest

from benchmarks.gpu.check.part import memcheck
from benchmarks.gpu.check.part.memcheck import MemcheckError, read_summary
from benchmarks.gpu.check.place import rehearsal
from benchmarks.gpu.record import Recorder, read_records
from megatron_lancet.training.platform.cpu import gpu_available

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
ERROR = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at void permute_kernel<float>(const T1 *, T1 *, int)+0x1a0
=========     by thread (32,0,0) in block (7,0,0)
=========     Access at 0x7f31c2a01200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f31c2a01000 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame:  [0x2e6c3f] in libcuda.so.1
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call
=========     Saved host backtrace up to driver entry point at error
=========
========= ERROR SUMMARY: 2 errors
"""
CUT_OFF = ERROR.partition("========= Program")[0]


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Puts a stand-in for the tool on PATH, which writes a log and may run its command."""
    if gpu_available():
        pytest.skip("make test runs it on the virtual GPU, where no device is seen")

    def install(log: str, runs: str) -> None:
        (tmp_path / "printed").write_text(log)
        tool = tmp_path / "bin" / memcheck.TOOL
        tool.parent.mkdir()
        tool.write_text(
            f"#!{sys.executable}\n"
            "import shutil, subprocess, sys, time\n"
            'assert sys.argv[1:3] == ["--tool", "memcheck"]\n'
            f'shutil.copy({str(tmp_path / "printed")!r}, sys.argv[sys.argv.index("--log-file") + 1])\n'
            f"command = sys.argv[sys.argv.index({sys.executable!r}):]\n"
            f"{runs}\n"
        )
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tool.parent), prepend=":")

    return install


RUNS_IT = "sys.exit(subprocess.run(command).returncode)"
FAILS = "print('no kernel image'); sys.exit(1)"


def results(folder, limit_s: float = 120) -> list[dict]:
    record = Recorder(folder / "memcheck.jsonl", limit_s)
    with rehearsal() as place:
        memcheck.run(record, place)
    found = read_records(folder / "memcheck.jsonl")
    assert record.num_errors == sum("error" in one for one in found)
    return found


def test_steps_run_under_the_tool_with_grouped_products(stand_in, tmp_path):
    stand_in(CLEAN, RUNS_IT)
    *steps, last = results(tmp_path)
    assert [step["plan"] for step in steps] == ["ours k=2", "pairs"]
    assert all(step["grouped_products"] > 0 and step["row_sums"] > 0 and not step["missing"] for step in steps)
    assert (last["errors"], last["steps"], last["ended"]) == (0, 2, True)


def test_a_kernel_that_did_not_run_is_an_error(stand_in, tmp_path):
    steps = [{"name": "step", "plan": plan, "missing": missing} for plan, missing in (("k", []), ("pairs", ["sums"]))]
    text = "".join(f"{json.dumps(step)}\n" for step in steps)
    stand_in(CLEAN, f"from pathlib import Path; Path(command[3]).write_text({text!r})")
    *found, last = results(tmp_path)
    assert found == steps
    assert last["error"].startswith("MemcheckError: expected kernels that did not run: sums in pairs")


def test_errors_of_kernels_are_an_error_with_their_text(stand_in, tmp_path):
    stand_in(ERROR, FAILS)
    (found,) = results(tmp_path)
    assert found["error"].startswith("MemcheckError: 2 errors")
    assert "Invalid __global__ read of size 4 bytes\nat void permute_kernel" in found["error"]


def test_a_step_that_fails_is_an_error(stand_in, tmp_path):
    stand_in(CLEAN, FAILS)
    (found,) = results(tmp_path)
    assert "0 of 2 steps ended" in found["error"]
    assert "no kernel image" in found["error"]


def test_a_tool_without_a_summary_is_an_error(stand_in, tmp_path):
    stand_in("========= COMPUTE-SANITIZER\n", FAILS)
    (found,) = results(tmp_path)
    assert "status 1 and no summary: no kernel image" in found["error"]


@pytest.mark.parametrize(("log", "is_error"), [("========= COMPUTE-SANITIZER\n", False), (CUT_OFF, True)])
def test_findings_of_a_tool_that_takes_too_long_are_kept(stand_in, tmp_path, log, is_error):
    stand_in(log, "time.sleep(600)")
    start_s = time.monotonic()
    (found,) = results(tmp_path, limit_s=memcheck._RESERVE_S + 1)
    assert time.monotonic() - start_s < 30
    assert ("error" in found) == is_error
    if not is_error:
        assert (found["ended"], found["steps"]) == (False, 0)


def test_without_the_tool_a_result_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(memcheck, "find_tool", lambda: None)
    (found,) = results(tmp_path)
    assert found["runs"] is False
    assert "neither on PATH nor in /usr/local/cuda/bin" in found["why"]


def test_the_tool_is_found_on_path(stand_in, tmp_path):
    stand_in(CLEAN, FAILS)
    assert memcheck.find_tool() == str(tmp_path / "bin" / memcheck.TOOL)


def test_output_of_the_tool_is_read():
    assert read_summary(CLEAN) == memcheck.Summary(0, [])
    summary = read_summary(ERROR)
    assert summary.num_errors == len(summary.errors) == 2
    assert summary.errors[0].endswith("Host Frame:  [0x2e6c3f] in libcuda.so.1")
    assert summary.errors[1].startswith("Program hit cudaErrorLaunchFailure")
    assert read_summary(CUT_OFF).num_errors is None
    with pytest.raises(MemcheckError, match="1 errors"):
        memcheck.check(read_summary(CUT_OFF), None, 0, "")
