"""Both demos, small: what they write, the short one with a paced transport; that an interrupt leaves nothing."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.demo.claim import claim, conditions
from benchmarks.demo.steps import Comparison
from benchmarks.demo.training_log.train_log import parse_iteration
from tests.cli.benchmarks.runs import REPO, namespaces, processes_of
from tests.ranks import launch

SMALL_DATA = ["--vocab-size", "500", "--corpus-megabytes", "0.2"]
SMALL_MODEL = "--num-layers 1 --hidden-size 32 --ffn-hidden-size 32 --seq-length 32 --eval-iters 1".split()
WHOLE_DEMO_TIMEOUT_S = 220
START_TIMEOUT_S, END_TIMEOUT_S = 90, 90
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


PYTHON = REPO / "tests/cli/stand_ins/python.py"
STAND_IN = """#!/bin/sh
exec {python} -S -E {stand_in} "$@"
"""
WITH_STAND_IN = """
import runpy, sys
sys.executable = sys.argv.pop(1)
runpy.run_module("benchmarks.demo", run_name="__main__", alter_sys=True)
"""


def arguments(output: Path, *options: str) -> list[str]:
    return ["--output", str(output), "--train-iters", "16", *SMALL_DATA, *options, "--", *SMALL_MODEL]


def whole_demo(folder: Path, words: Sequence[str]) -> str:
    """Runs a demo to its end; returns what it printed.

    Its tools, torchrun and all ranks are forked: imports would be most of their time.
    """
    interpreter = folder / "python"
    interpreter.write_text(STAND_IN.format(python=sys.executable, stand_in=PYTHON))
    interpreter.chmod(0o755)
    forks = {"PRELOADED": str(launch.preloaded().address), "PYTHON_EXEC": str(interpreter)}
    done = subprocess.run(
        [sys.executable, "-c", WITH_STAND_IN, interpreter, *words],
        cwd=REPO,
        env={**os.environ, **forks},
        capture_output=True,
        text=True,
        timeout=WHOLE_DEMO_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """The output folder of a demo with a paced transport, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    return folder / "run", whole_demo(folder, arguments(folder / "run", "--link", "paced", "--rate", "50"))


def test_short_demo_compares_stock_and_ours(finished):
    output, printed = finished
    summary = json.loads((output / "summary.json").read_text())
    assert summary["origin"]["machine_speed"]["gemm_gflops_after"] > 0
    assert summary["iterations"] == 16
    assert summary["link"] == "paced, 50 Mbit/s"
    assert "PACED transport, no real link" in printed
    assert summary["max_loss_difference"] <= 2e-6
    assert summary["validation_loss"] == pytest.approx(summary["stock_validation_loss"], rel=2e-6)
    assert 5.5 < summary["validation_loss"] < 6.5  # about ln(500) = 6.2
    low, high = summary["speedup_quartiles"]
    assert 0 < low <= summary["speedup"] <= high
    made = Comparison.read(summary).summary()
    assert made == {key: summary[key] for key in made}
    assert (summary["attention"], summary["wanted_share"]) == ("DotProductAttention", None)
    # 8 samples of 32 tokens, top-2: in a step about 256 rows of 32 values go to the other rank, 4 times.
    assert summary["stock_exposed_ms"] > 0.8 * 256 / 2 * 32 * 4 * 4 * 8 / 50e3, "the link was not waited for"
    # Sends half of the gradients of embeddings and attention, then half of their sum, 4 bytes each.
    num_reduced = 500 * 32 + 4 * 32 * 32
    assert min(summary["stock_reduced_ms"], summary["reduced_ms"]) > num_reduced * 4 * 8 / 50e3
    assert summary["num_measured_steps"] == 6
    assert summary["plan"].startswith("chunks=2 dim=batch")
    assert summary["origin"]["settings"]["MALLOC_TRIM_THRESHOLD_"] == str(8 << 30)
    assert summary["sample"]["prompt"] == "def read(self"
    assert f"\n\n{textwrap.fill(f'{claim(summary)} {conditions(summary)}', 118)}\n" in printed
    for picture in ("steps.png", "loss_curve.png"):
        assert (output / picture).read_bytes().startswith(b"\x89PNG")
    assert (output / "report.json").is_file()


def test_short_demo_resumes_ours_from_its_checkpoint(finished):
    output, _ = finished
    ours, stock = (output / name for name in ("train.log", "stock.log"))
    assert f"successfully loaded checkpoint from {output / 'checkpoints'}" in ours.read_text()
    assert "successfully loaded checkpoint" not in stock.read_text()
    assert "Megatron-Lancet plan: off" in stock.read_text()


@pytest.mark.usefixtures("shaped_network")
def test_interrupted_demo_leaves_neither_namespaces_nor_ranks(finished, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(finished[0], output)
    demo = [sys.executable, "-m", "benchmarks.demo", *arguments(output)]
    with subprocess.Popen(demo, cwd=REPO, stdout=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while len(processes_of(str(output))) < 5:  # itself, and two ranks of each variant
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        assert f"lancet-{process.pid}-0" in namespaces()
        process.send_signal(signal.SIGINT)
        assert process.wait(END_TIMEOUT_S) == 130
    assert processes_of(str(output)) == []
    assert f"lancet-{process.pid}-0" not in namespaces()
    assert not (output / "summary.json").exists()
    assert not (output / "steps.png").exists()
    assert (output / "data" / "prepared.json").exists()


@pytest.mark.usefixtures("shaped_network")
def test_demo_without_root_makes_its_namespaces_in_one_of_users(tmp_path):
    allowed = subprocess.run(["unshare", "--user", "--map-root-user", "--net", "--mount", "true"], check=False)
    if allowed.returncode != 0:
        pytest.skip("this kernel allows no user namespaces without root")
    before = namespaces()
    # In place of the interpreter, this shows what the demo is started as.
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$@"\nid -u\nip netns add inside && ip netns list\n')
    program.chmod(0o755)
    script = (
        f"import os, sys; sys.executable = {str(program)!r}; os.geteuid = lambda: 1000\n"
        "from benchmarks.demo.links.link import enter_user_namespace\n"
        "enter_user_namespace('auto', ['--rate', '9'])"
    )
    started = subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, timeout=60, check=False
    )
    assert started.stdout.splitlines() == ["-m benchmarks.demo --in-user-namespace --rate 9", "0", "inside"]
    assert namespaces() == before


@pytest.mark.nightly
def test_long_demo_trains_resumes_and_validates(finished, tmp_path):
    output = tmp_path / "demo"
    shutil.copytree(finished[0] / "data", output / "data")
    (output / ".megatron-lancet-demo").touch()
    printed = whole_demo(
        tmp_path, ["--long", "--output", str(output), "--train-iters", "8", *SMALL_DATA, "--", *SMALL_MODEL]
    )
    summary = json.loads((output / "summary.json").read_text())
    assert summary["iterations"] == 8
    assert 4.0 < summary["unigram_entropy"] < 6.0
    assert 5.5 < summary["validation_loss"] < 6.5  # about ln(500) = 6.2
    assert summary["tokens_per_s"] > 0
    assert f"{summary['validation_loss']:.3f} nats per token" in printed
    assert summary["sample"]["prompt"] == "def read(self"
    assert "      | def read(self" + summary["sample"]["text"].split("\n")[0] in printed
    assert json.loads((output / "sample.json").read_text())["iteration"] == 8
    assert (output / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (output / "report.json").is_file()
    check_log(output / "train.log", output)


def check_log(log: Path, output: Path) -> None:
    """One run in two parts: the second one starts where the first stopped, on the same schedule."""
    text = log.read_text()
    assert f"successfully loaded checkpoint from {output / 'checkpoints'}" in text
    found = [(step, line) for line in text.splitlines() if (step := parse_iteration(line))]
    assert [step.number for step, _ in found] == list(range(1, 9))
    rates = [float(re.search(r"learning rate: (\S+)", line)[1]) for _, line in found]
    assert rates == sorted(rates, reverse=True), "warm-up of the second part, or a schedule of its own"
    assert len(set(rates)) == 8
