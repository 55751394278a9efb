"""The first run on a GPU: what it runs, what it leaves in its folder, and what it refuses."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import check, parse_arguments
from megatron_lancet.errors import UsageError

TOOL = Path(__file__).resolve().parents[3] / "tools" / "check_gpu.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("tool_check_gpu", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python(tool, code: str, name: str, limit_s: float = 30):
    return tool.Part(name, [sys.executable, "-c", code], limit_s)


def test_a_part_that_fails_or_hangs_does_not_keep_the_others_from_running(tool, tmp_path, capsys):
    all_parts = [
        python(tool, "raise SystemExit(3)", "failing"),
        python(tool, "print('begun', flush=True); import time; time.sleep(60)", "hanging", limit_s=1),
        tool.Part("missing", [str(tmp_path / "missing")], 1),
        python(tool, "print('fine')", "fine"),
    ]
    assert not tool.run_all(tmp_path, all_parts)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(part["name"], part["status"]) for part in summary] == [
        ("failing", 3),
        ("hanging", None),
        ("missing", None),
        ("fine", 0),
    ]
    assert (tmp_path / "hanging.log").read_text() == "begun\n\nstopped after 1 s\n"
    assert "can't be started" in (tmp_path / "missing.log").read_text()
    assert (tmp_path / "fine.log").read_text() == "fine\n"
    assert "exit 3" in capsys.readouterr().out
    assert tool.run_all(tmp_path, all_parts[-1:])


def test_parts_fit_into_ten_minutes_and_their_arguments_exist(tool, tmp_path, monkeypatch):
    all_parts = {part.name: part for part in tool.parts(tmp_path)}
    assert sum(part.limit_s for part in all_parts.values()) < 600
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    command = all_parts["benchmark"].command
    args = parse_arguments(list(command[command.index("benchmarks.gpu") + 1 :]))
    assert len(check(args)) == 1
    assert args.output == tmp_path / "benchmark.json"


def test_a_machine_without_a_gpu_or_with_one_connection_is_refused(tool, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="finds none"):
        tool.main([str(tmp_path / "results")])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(UsageError, match="CUDA_DEVICE_MAX_CONNECTIONS is 1"):
        tool.main([str(tmp_path / "results")])
    assert not (tmp_path / "results").exists()
