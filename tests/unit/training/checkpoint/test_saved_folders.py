"""Which folders a save touches, and when: several saves of a step, temporary ones, and Weights & Biases."""

import shutil
from types import SimpleNamespace

import pytest
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.training import async_utils, checkpointing, training

from megatron_lancet.checkpoint.files import TRACKER
from megatron_lancet.errors import CheckpointError
from megatron_lancet.features.checkpoints import patches
from megatron_lancet.features.checkpoints.load_save import Checkpoints
from megatron_lancet.features.checkpoints.publish import writing_tracker
from tests.unit.training.checkpoint.test_load_save import Usage, alone, arguments  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("alone")


def publish(folder, step):
    """As rank 0 does at the end of a save."""
    with writing_tracker(folder / TRACKER) as tracker:
        tracker.write(str(step))


class SlowWriter:
    """Replaces the queue of ``--async-save``: the last file of a save is written when the save is finalized."""

    def __init__(self, folder):
        self.folder = folder
        self.begun = []

    def save(self, step):
        incomplete = self.folder / f"incomplete_iter_{step:07}"
        incomplete.mkdir(parents=True, exist_ok=True)
        (incomplete / "first").touch()
        self.begun.append(step)

    def get_num_unfinalized_calls(self):
        return len(self.begun)

    def maybe_finalize_async_calls(self, blocking, no_dist):
        while blocking and self.begun:
            step = self.begun.pop(0)
            (self.folder / f"incomplete_iter_{step:07}" / "last").touch()
            publish(self.folder, step)


def test_save_of_a_step_waits_for_the_one_before(tmp_path, monkeypatch):
    """A larger batch, or a NaN in the next step, saves a step again that --save-interval has begun to save."""
    args, writer = arguments(tmp_path, async_save=True), SlowWriter(tmp_path)
    monkeypatch.setattr(async_utils, "get_args", lambda: args)
    monkeypatch.setattr(async_utils, "_async_calls_queue", writer)
    checkpoints = Checkpoints(args)
    for step, begun in ((6, [6]), (8, [6, 8]), (8, [8])):
        checkpoints._save(step, lambda step=step: writer.save(step))
        assert writer.begun == begun
    writer.maybe_finalize_async_calls(blocking=True, no_dist=False)
    for name in ("iter_0000006", "iter_0000008"):
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["first", "last"]


@pytest.mark.parametrize("is_named", [False, True])
def test_temporary_checkpoint_is_cared_for_in_its_folder(folder, monkeypatch, is_named):
    """Its disk may have room for few, of which Megatron removes one first."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 1000))
    temporary = folder / ("ramdisk" if is_named else "non_persistent")
    changes = {"non_persistent_global_ckpt_dir": str(temporary)} if is_named else {}
    for place in (folder, temporary):
        (place / "incomplete_iter_0000008").mkdir(parents=True)
    shutil.copytree(folder / "iter_0000006", temporary / "iter_0000006")

    def full(iteration, *, non_persistent_ckpt):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "save_checkpoint", full)
    args = arguments(folder, non_persistent_ckpt_type="global", **changes)
    with Checkpoints(args).watched(), pytest.raises(CheckpointError, match=f"not be saved in {temporary}: No space"):
        training.save_checkpoint(8, non_persistent_ckpt=True)
    assert (folder / "incomplete_iter_0000008").exists()
    assert not (temporary / "incomplete_iter_0000008").exists()


def test_local_checkpoint_is_left_to_megatron(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 1000))
    (folder / "incomplete_iter_0000008").mkdir()
    args = arguments(folder, non_persistent_ckpt_type="local")
    assert Checkpoints(args)._save(8, lambda: "saved", is_persistent=False) == "saved"
    assert (folder / "incomplete_iter_0000008").exists()


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """What Weights & Biases was given, as the last rank does; it refuses a path that does not exist."""
    paths = []

    def record(path, tracker, folder, step):
        assert (tmp_path / path).is_dir()
        paths.append(path)

    monkeypatch.setattr(checkpointing.wandb_utils, "on_save_checkpoint_success", record)
    return paths


def announce(tmp_path, below=""):
    incomplete = tmp_path / "incomplete_iter_0000008" / below
    incomplete.mkdir(parents=True, exist_ok=True)
    checkpointing.wandb_utils.on_save_checkpoint_success(str(incomplete), tmp_path / TRACKER, tmp_path, 8)


@pytest.mark.parametrize("below", ["", "mp_rank_00"])  # --ckpt-format torch_dist, torch
def test_checkpoint_is_recorded_after_it_was_renamed(tmp_path, recorded, monkeypatch, below):
    def stock(iteration):
        announce(tmp_path, below)  # the last rank is faster than rank 0
        publish(tmp_path, iteration)

    monkeypatch.setattr(training, "save_checkpoint", stock)
    with Checkpoints(arguments(tmp_path)).watched():
        training.save_checkpoint(8)
    assert recorded == [str(tmp_path / "iter_0000008" / below)]


def test_asynchronous_one_is_recorded_after_a_barrier(tmp_path, recorded, monkeypatch):
    scheduled: list[AsyncRequest] = []
    monkeypatch.setattr(checkpointing, "schedule_async_save", scheduled.append)
    monkeypatch.setattr(patches, "dist", SimpleNamespace(barrier=lambda: publish(tmp_path, 8)))  # rank 0 reaches it

    def stock(iteration):
        checkpointing.schedule_async_save(AsyncRequest(None, (), [lambda: announce(tmp_path)]))

    monkeypatch.setattr(training, "save_checkpoint", stock)
    with Checkpoints(arguments(tmp_path)).watched():
        training.save_checkpoint(8)
        for function in scheduled[0].finalize_fns:
            function()
    assert recorded == [str(tmp_path / "iter_0000008")]
