"""The long demo's decisions and its handling of child processes; the whole of it is in test_demo.py."""

import json
import os
import sys
import time

import pytest

from benchmarks.demo import data, long_run
from benchmarks.demo.__main__ import parse_arguments
from benchmarks.demo.folder import open_folder
from benchmarks.demo.training_log.train_log import Iteration
from benchmarks.demo.training_log.training_process import Progress
from megatron_lancet.errors import UsageError

SETTINGS = {"vocab_size": 600, "corpus_megabytes": None, "python": "3.12.1"}


@pytest.fixture
def folder(tmp_path):
    return open_folder(tmp_path / "demo")


def write_prepared(folder) -> dict[str, object]:
    prepared = {"settings": SETTINGS, "num_tokens": 1000, "unigram_entropy": 5.5}
    for name in ("tokenizer.model", "stdlib_text_document.bin", "stdlib_text_document.idx"):
        (folder.data / name).write_text("x")
    folder.prepared.write_text(json.dumps(prepared))
    return prepared


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "expert_parallel_size"),
    [(0, 2, 2), (1, 1, 1), (2, 2, 2), (3, 2, 2), (4, 4, 2), (7, 6, 2), (8, 8, 2), (16, 8, 2)],
)
def test_demo_uses_an_even_number_of_gpus_or_two_cpu_ranks(num_gpus, num_ranks, expert_parallel_size):
    layout = long_run.choose_layout(num_gpus)
    assert (layout.num_ranks, layout.expert_parallel_size) == (num_ranks, expert_parallel_size)
    assert ("--transformer-impl" in layout.flags) == (num_gpus > 0)


def test_demo_says_that_one_gpu_has_nothing_to_overlap():
    assert "no communication to overlap" in long_run.choose_layout(1).description


@pytest.mark.parametrize("num_gpus", [0, 1, 6])
def test_demo_batches_fit_the_ranks(folder, num_gpus):
    layout = long_run.choose_layout(num_gpus)
    flags = long_run.training_flags(folder, layout, 100, [])
    micro, whole = (int(long_run.last_value(flags, f"--{name}-batch-size")) for name in ("micro", "global"))
    assert whole % (micro * layout.num_ranks) == 0
    assert micro >= 2  # so that there is a chunk to overlap with


def test_demo_has_one_learning_rate_schedule_for_both_parts(folder):
    flags = long_run.training_flags(folder, long_run.choose_layout(0), 100, [])
    assert long_run.last_value(flags, "--train-iters") == long_run.last_value(flags, "--lr-decay-iters") == "100"
    assert int(long_run.last_value(flags, "--eval-interval")) > 100


def test_demo_flags_of_the_user_override(folder):
    flags = long_run.training_flags(folder, long_run.choose_layout(0), 100, ["--seq-length", "64", "--lr=1e-4"])
    assert flags[-3:] == ["--seq-length", "64", "--lr=1e-4"]
    assert long_run.last_value(flags, "--seq-length") == "64"
    assert long_run.last_value(flags, "--lr") == "1e-4"


def test_demo_takes_megatrons_flags_after_two_dashes():
    arguments = parse_arguments(["--long", "--train-iters", "8", "--", "--num-layers", "1"])
    assert (arguments.train_iters, arguments.megatron_flags) == (8, ["--num-layers", "1"])


def test_demo_refuses_a_run_without_a_step_for_each_part(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--long", "--train-iters", "1"])
    assert "at least 2" in capsys.readouterr().err


def test_second_demo_keeps_the_data_and_trains_afresh(folder):
    write_prepared(folder)
    for old in (folder.checkpoints / "iter_0000010", folder.cache):
        old.mkdir(parents=True)
    for old in (folder.summary, folder.picture, folder.report, folder.train_log):
        old.write_text("old")
    open_folder(folder.root)
    assert {path.name for path in folder.root.iterdir()} == {folder.mark.name, "data"}
    assert folder.prepared.is_file()


def test_demo_refuses_a_folder_of_something_else(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match=r"not empty and not of this demo.*--output"):
        open_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_demo_refuses_a_file_as_output_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot use .*file as output folder"):
        open_folder(tmp_path / "file")


def test_demo_reuses_complete_data(folder):
    prepared = write_prepared(folder)
    assert data.load_prepared(folder, SETTINGS) == prepared


@pytest.mark.parametrize("missing", ["prepared.json", "tokenizer.model", "stdlib_text_document.idx"])
def test_demo_prepares_incomplete_data_again(folder, missing):
    write_prepared(folder)
    (folder.data / missing).unlink()
    assert data.load_prepared(folder, SETTINGS) is None


@pytest.mark.parametrize("other", [{"vocab_size": 700}, {"corpus_megabytes": 1.0}, {"python": "3.13.0"}])
def test_demo_prepares_data_of_other_settings_again(folder, other):
    write_prepared(folder)
    assert data.load_prepared(folder, {**SETTINGS, **other}) is None


def test_failing_tool_of_demo_is_one_error_with_end_of_its_log(folder):
    with pytest.raises(
        UsageError, match=r"tools/data/prepare_corpus.py ended with status 2.*prepare.log:\n(.*\n)*.*required: --output"
    ):
        data.run_tool(folder.prepare_log, "data/prepare_corpus")


def test_demo_training_is_logged_and_printed(tmp_path):
    lines: list[str] = []
    script = "import os, sys; print('one'); print('two ' + os.environ['OMP_NUM_THREADS'], file=sys.stderr)"
    long_run.train([sys.executable, "-c", script], 2, tmp_path / "log", lines.append)
    num_threads = max(1, data.num_cores() // 2)
    assert sorted(lines) == ["one\n", f"two {num_threads}\n"]
    assert (tmp_path / "log").read_text().endswith("".join(lines))


def test_failing_training_of_demo_is_one_error_with_its_log(tmp_path):
    script = "import sys; print('the reason'); sys.exit(3)"
    with pytest.raises(UsageError, match=r"ended with status 3.*log:\n(.*\n)*  the reason"):
        long_run.train([sys.executable, "-c", script], 2, tmp_path / "log", lambda line: None)


def test_interrupted_demo_ends_its_training(tmp_path):
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    pids: list[int] = []

    def interrupt(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        long_run.train([sys.executable, "-c", script], 2, tmp_path / "log", interrupt)
    assert time.monotonic() - start_s < 30
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_demo_progress_without_a_terminal_is_in_lines(capsys):
    progress = Progress(num_iterations=60, tokens_per_iteration=1000)
    for number in range(1, 61):
        progress.step(Iteration(number, 60, lm_loss=4.0, step_ms=500.0))
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split("/")[0].split()[-1]) for line in lines] == [1, 25, 50, 60]
    assert lines[0] == "      iteration    1/60: lm loss 4.000, 2000 tokens/s"
