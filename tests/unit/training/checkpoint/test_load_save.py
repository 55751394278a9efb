"""What is said when a checkpoint can't be saved or loaded, and when SIGTERM saves one; a world of one rank."""

import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lancet.checkpoint.files import TRACKER
from megatron_lancet.config import PlanChoice
from megatron_lancet.errors import CheckpointError, UsageError
from megatron_lancet.features.checkpoints import load_save, sigterm
from megatron_lancet.features.checkpoints.load_save import Checkpoints, check_before_start
from megatron_lancet.features.checkpoints.sigterm import StopRequest, saves_on_sigterm
from megatron_lancet.training.process.exit import RankStatus
from tests.unit.training.configs import config_with

Usage = namedtuple("Usage", "total used free")


def arguments(folder, **changes) -> SimpleNamespace:
    known = {
        "load": str(folder), "save": str(folder), "ckpt_step": None, "ckpt_format": "torch_dist",
        "pretrained_checkpoint": None, "non_persistent_ckpt_type": None, "non_persistent_global_ckpt_dir": None,
        "exit_on_missing_checkpoint": False, "async_save": False,
        "exit_signal_handler": False, "exit_signal_handler_for_training": False,
    }  # fmt: skip
    return SimpleNamespace(**{**known, **changes})


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(load_save, "from_rank_0", lambda ask: ask())
    for module in (load_save, sigterm):
        monkeypatch.setattr(module.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(load_save.dist, "all_gather_object", lambda to, own: to.__setitem__(0, own))
    monkeypatch.setattr(sigterm.dist, "all_gather", lambda to, own: to[0].copy_(own))


def raising(error: BaseException):
    def fail(*_: object):
        raise error

    return fail


def test_too_little_disk_space_ends_the_run_before_saving(folder, alone, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 1000))
    expected = rf"of step 8 was not saved: {folder} has 0\.0 MB free, and the last .* takes 0\.0 MB: free some space\. "
    with pytest.raises(CheckpointError, match=expected + "The latest checkpoint there is still from step 6"):
        Checkpoints(arguments(folder))._save(8, raising(AssertionError("must not be called")))


def test_enough_disk_space_or_no_earlier_checkpoint_is_accepted(folder, alone, tmp_path):
    assert Checkpoints(arguments(folder))._save(8, lambda: "saved") == "saved"
    assert Checkpoints(arguments(tmp_path / "none"))._save(8, lambda: "saved") == "saved"


@pytest.mark.parametrize(
    ("noted", "expected"),
    [
        (OSError(28, "No space left on device"), r"rank 0: No space left on device\. \d+\.\d MB are free there: free"),
        (OSError(5, "Input/output error"), r"rank 0: Input/output error\. The latest checkpoint there is still"),
        (None, r"\.distcp: worker failure\. The latest"),
    ],
)
def test_rank_that_could_not_save_is_named(folder, alone, noted, expected):
    saving = Checkpoints(arguments(folder))

    def save():
        if noted is not None:
            saving._failed_to_write(noted)
        raise CheckpointException("write", {1: (RuntimeError(".distcp: worker failure"), None)})

    with pytest.raises(CheckpointError, match=expected):
        saving._save(8, save)


def test_lost_rank_while_saving_is_named(folder, alone):
    error = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:37597. This is typically")
    with pytest.raises(CheckpointError, match=r"could not be saved in .*: another rank is gone\. The latest"):
        Checkpoints(arguments(folder))._save(8, raising(error))


def test_unexpected_error_while_saving_is_raised_unchanged(folder, alone):
    with pytest.raises(KeyError):
        Checkpoints(arguments(folder))._save(8, raising(KeyError("weight")))


def test_unreadable_checkpoint_folder_is_refused(folder, alone, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", raising(PermissionError(13, "Permission denied")))
    with pytest.raises(CheckpointError, match=r"step 8 was not saved: .*Permission denied\. The latest"):
        Checkpoints(arguments(folder))._save(8, raising(AssertionError("must not be called")))


@pytest.mark.parametrize(
    ("error", "kind", "expected"),
    [
        (SystemExit(), CheckpointError, "Megatron says why above"),
        (UsageError("pass --x"), UsageError, "^pass --x$"),
        (AssertionError("the scheduler differs"), UsageError, "refuses the checkpoint in .*: the scheduler differs"),
        (KeyError("weight"), CheckpointError, "can't load .*: KeyError: 'weight'. Nothing .* step 4: --ckpt-step 4"),
        (
            CheckpointException("read", {3: (OSError(5, "I/O error"), None)}),
            CheckpointError,
            "can't load .*: I/O error",
        ),
    ],
)
def test_checkpoint_that_megatron_cannot_load_is_an_error(folder, alone, error, kind, expected):
    """Stock prints, and ends with status 0 where it calls sys.exit()."""
    with pytest.raises(kind, match=expected):
        Checkpoints(arguments(folder))._load(raising(error))


def test_cut_checkpoint_part_is_found_before_loading(folder, alone):
    part = folder / "iter_0000006" / "__0_0.distcp"
    os.truncate(part, part.stat().st_size - 1)
    check_before_start(arguments(folder))  # looks at a handful of files only
    with pytest.raises(UsageError, match=r"__0_0\.distcp is truncated"):
        Checkpoints(arguments(folder))._load(raising(AssertionError("must not be called")))


def test_check_before_start_looks_where_megatron_loads(folder, tmp_path):
    (folder / "iter_0000006" / "metadata.json").unlink()
    for changes in ({"load": None}, {"non_persistent_ckpt_type": "global"}, {"load": "msc://bucket"}):
        check_before_start(arguments(folder, **changes))
    nothing = str(tmp_path / "none")
    for changes in ({}, {"load": nothing, "pretrained_checkpoint": str(folder)}):
        with pytest.raises(UsageError, match=r"metadata\.json is missing"):
            check_before_start(arguments(folder, **changes))
    check_before_start(arguments(nothing))
    with pytest.raises(UsageError, match="--exit-on-missing-checkpoint: there is no checkpoint"):
        check_before_start(arguments(nothing, exit_on_missing_checkpoint=True))


def test_checkpoint_of_step_0_is_no_missing_one(folder):
    (folder / "iter_0000006").rename(folder / "iter_0000000")
    (folder / TRACKER).write_text("0")
    check_before_start(arguments(folder, exit_on_missing_checkpoint=True))


@pytest.mark.parametrize(
    ("changes", "plan", "expected"),
    [
        ({}, PlanChoice.AUTO, True),
        ({}, PlanChoice.OFF, False),
        ({"save": None}, PlanChoice.AUTO, False),
        ({"exit_signal_handler_for_training": True}, PlanChoice.AUTO, False),
        ({"async_save": True}, PlanChoice.AUTO, False),
    ],
)
def test_sigterm_saves_depending_on_plan_and_flags(tmp_path, changes, plan, expected):
    args = arguments(tmp_path, **changes)
    assert saves_on_sigterm(args, config_with(plan=plan)) is expected
    assert args.exit_signal_handler is expected


def test_sigterm_with_asynchronous_saves_is_explained(tmp_path, capsys):
    """Their process would end at the signal, and the rank would wait for it."""
    for save, plan in ((None, PlanChoice.AUTO), (str(tmp_path), PlanChoice.OFF), (str(tmp_path), PlanChoice.AUTO)):
        assert not capsys.readouterr().out
        assert not saves_on_sigterm(arguments(tmp_path, save=save, async_save=True), config_with(plan=plan))
    assert "To finish the step and save at SIGTERM, drop --async-save" in capsys.readouterr().out


def test_megatrons_own_sigterm_handler_is_left_alone(tmp_path):
    args = arguments(tmp_path, exit_signal_handler=True)
    assert not saves_on_sigterm(args, config_with())
    assert args.exit_signal_handler


class HeldTimer:
    """Replaces a timer thread; the test calls the function."""

    def __init__(self, interval_s: float, function: Callable[[], None]) -> None:
        self.interval_s, self.function = interval_s, function
        self.daemon = False
        self.num_starts = 0

    def start(self) -> None:
        assert self.daemon, "it would prevent the process from exiting"
        self.num_starts += 1


def test_sigterm_requests_a_stop_once_the_loop_runs(alone, monkeypatch, capfd):
    timers: list[HeldTimer] = []

    def make(interval_s: float, function: Callable[[], None]) -> HeldTimer:
        timers.append(HeldTimer(interval_s, function))
        return timers[-1]

    monkeypatch.setattr(sigterm.threading, "Timer", make)
    status = RankStatus()
    stop = StopRequest(status, torch.device("cpu"))
    assert status.on_sigterm is None
    stop.begin()
    assert stop.signals_received() == [False]
    status.describe = lambda: "2 steps done"
    status.on_sigterm()
    status.on_sigterm()
    assert stop.signals_received() == [True]
    assert [(timer.interval_s, timer.num_starts) for timer in timers] == [(20.0, 1)]
    assert capfd.readouterr().err == ""
    timers[0].function()
    assert capfd.readouterr().err == "SIGTERM was received 20 s ago, and the run continues: rank 0, 2 steps done\n"
