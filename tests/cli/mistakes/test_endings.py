"""The end of a training: reports of several runs in one folder, resumed runs, runs that end before a plan is final."""

import pytest

from megatron_lancet.errors import UsageError
from megatron_lancet.files.report_folder import check_report_folder, cleared, training_counts_more
from tests.faults.test_never_hangs import WORKER as FAULTY_WORKER
from tests.ranks import launch
from tests.ranks.pretraining import EP2, WORKER, command_line, pretrain

pytestmark = pytest.mark.distributed

DUMP = "  transformer_impl ......"
VIEWS = {"timeline.html", "trace.json"}
STOCK = ["--lancet-plan", "off"]
SAVE = ["--save-interval", 2]


@pytest.fixture(scope="module")
def first(tmp_path_factory, token_data):
    """A run of stock modules that saved a checkpoint and wrote a report, and the folder of both."""
    folder = tmp_path_factory.mktemp("first")
    flags = [*EP2, *STOCK, *SAVE, "--save", folder / "checkpoints", "--lancet-report", folder, "--lancet-verbose"]
    return pretrain(token_data, flags, folder, train_iters=2), folder


def test_list_of_arguments_is_printed_on_request(first, token_data, tmp_path):
    """Under a plan and in stock: Megatron's list is 850 lines, and ours are the ones to read."""
    run, _ = first
    assert run.outputs[0].count(DUMP) == 1
    silent = pretrain(token_data, [*EP2, *STOCK], tmp_path, train_iters=1)
    assert DUMP not in "".join(silent.outputs)


def test_resumed_run_says_its_plan_and_keeps_the_old_report(first, token_data):
    _, folder = first
    report = (folder / "report.json").read_text()
    flags = [*EP2, "--lancet-num-chunks", 2, "--load", folder / "checkpoints", "--lancet-report", folder]
    flags += ["--override-opt_param-scheduler"]
    run = pretrain(token_data, flags, folder, train_iters=4)
    plan = "chunks=2 dim=batch range=stack dw=fill dw-window=4"
    line = f"the checkpoint was saved under --lancet-plan off, and this run goes on under {plan}: the same weights"
    assert run.outputs[0].count(f"Megatron-Lancet plan: {line}") == 1
    assert (folder / "earlier_1" / "report.json").read_text() == report
    assert (folder / "report.json").read_text() != report
    assert run.outputs[0].count(f"the report of an earlier run is now in {folder / 'earlier_1'}\n") == 1


@pytest.mark.parametrize(
    ("extra", "returncode", "message"),
    [
        ([], 2, "Pass --override-opt_param-scheduler to go on with this run's schedule, or"),
        (
            ["--hidden-size", 32],
            1,
            "The checkpoint is of another model: pass the flags of sizes and layers that it was",
        ),
    ],
    ids=["schedule", "shapes"],
)
def test_checkpoint_that_does_not_fit_has_right_advice(first, token_data, tmp_path, extra, returncode, message):
    """Megatron's own handler of SIGTERM must not let the second rank print its line, too."""
    _, folder = first
    flags = [*EP2, *STOCK, "--load", folder / "checkpoints", "--exit-signal-handler", *extra]
    ranks = launch.start(WORKER, command_line(token_data, ["--train-iters", 4, *flags]), 2, tmp_path)
    assert ranks[0].wait(60) == returncode
    ranks[1].send_signal(15)
    first_rank, second = launch.finish(ranks, tmp_path, 60)
    [line] = [line for line in first_rank.output.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "--ckpt-step" not in line
    assert "Traceback" not in first_rank.output
    assert second.returncode == 128 + 15
    assert "error: " not in second.output


def test_run_that_ends_while_tuning_has_a_timeline(token_data, tmp_path):
    flags = [*EP2, "--lancet-report", tmp_path, "--save", tmp_path / "checkpoints", "--save-interval", 200]
    arguments = command_line(token_data, ["--train-iters", 200, *flags])
    env = {"LANCET_TEST_FAULT": "term@L2.c0.F.dispatch", "LANCET_TEST_FAULTY_RANK": "1", "LANCET_TEST_FAULTY_STEP": "6"}
    results = launch.run(FAULTY_WORKER, arguments, 2, tmp_path / "log", env=env)
    launch.check(results)
    assert {path.name for path in tmp_path.iterdir()} >= VIEWS
    assert "tuning             not finished: the run ended during" in results[0].output
    line = "Megatron-Lancet report: the run ended before a step under its final plan: the timeline and the table are of"
    assert results[0].output.count(line) == 1


def test_unwritable_folder_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "file").write_text("")
    for folder, message in ((tmp_path / "file", "found a file"), (tmp_path / "file" / "below", "can't write there")):
        with pytest.raises(UsageError, match=message):
            check_report_folder(folder)
    check_report_folder(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    monkeypatch.setenv("RANK", "1")
    check_report_folder(tmp_path / "file")  # another node may lack the folder: only rank 0 writes


def test_earlier_reports_are_numbered_and_other_files_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "notes.txt").write_text("")
    for number in (1, 2):
        (tmp_path / "report.json").write_text(str(number))
        assert cleared(tmp_path, ["report.json", "plan.json"], print) == tmp_path
        assert (tmp_path / f"earlier_{number}" / "report.json").read_text() == str(number)
    assert cleared(tmp_path, ["report.json"], print) == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "earlier_1", "earlier_2"}


def test_report_that_fails_is_a_warning_on_rank_0(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    with training_counts_more(tmp_path):
        (tmp_path / "missing" / "report.json").write_text("")
    warning = (
        f"warning: the training is done, but its report can't be written to {tmp_path}: No such file or directory\n"
    )
    assert capsys.readouterr().err == warning
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(FileNotFoundError), training_counts_more(tmp_path):
        (tmp_path / "missing" / "report.json").write_text("")
