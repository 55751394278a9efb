"""Which checkpoints are complete, and how one becomes the latest; the files are torch's own."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_lancet.checkpoint.files import TRACKER, complete_steps, find_damage, find_missing_files
from megatron_lancet.errors import UsageError
from megatron_lancet.features.checkpoints import publish as publishing
from megatron_lancet.features.checkpoints.load_save import check_loadable
from megatron_lancet.features.checkpoints.publish import publish, remove_leftover, writing_tracker

FORMAT = "torch_dist"


def cut(file) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "__0_0.distcp is truncated": lambda checkpoint: cut(checkpoint / "__0_0.distcp"),
    "__0_0.distcp is missing": lambda checkpoint: (checkpoint / "__0_0.distcp").unlink(),
    "metadata.json is missing, which is written when all else is": lambda checkpoint: (
        checkpoint / "metadata.json"
    ).unlink(),
    "metadata.json is damaged": lambda checkpoint: cut(checkpoint / "metadata.json"),
    ".metadata is missing": lambda checkpoint: (checkpoint / ".metadata").unlink(),
    ".metadata is damaged": lambda checkpoint: cut(checkpoint / ".metadata"),
    "there is no such folder": shutil.rmtree,
}


def test_complete_checkpoint_has_no_flaw(folder):
    assert find_damage(folder / "iter_0000006", FORMAT) is None
    assert complete_steps(folder, FORMAT) == [2, 4, 6]
    check_loadable(folder, None, FORMAT)


@pytest.mark.parametrize("flaw", DAMAGE)
def test_damaged_checkpoint_is_refused_with_advice(folder, flaw):
    DAMAGE[flaw](folder / "iter_0000006")
    with pytest.raises(UsageError) as refused:
        check_loadable(folder, None, FORMAT)
    message = str(refused.value)
    assert f"{folder / 'iter_0000006'}, named by {TRACKER}, can't be loaded: {flaw}" in message
    assert f"Complete there: steps 2, 4. To go on from step 4 pass --ckpt-step 4, or write 4 into {folder}" in message
    check_loadable(folder, 4, FORMAT)


@pytest.mark.parametrize("flaw", [flaw for flaw in DAMAGE if "distcp" not in flaw and flaw != ".metadata is damaged"])
def test_checkpoint_outline_shows_flaws_in_few_files(folder, flaw):
    DAMAGE[flaw](folder / "iter_0000006")
    assert find_missing_files(folder / "iter_0000006", FORMAT) == flaw


def test_checkpoint_index_is_read_without_running_what_it_names(folder, tmp_path):
    index = folder / "iter_0000006" / ".metadata"
    ran = tmp_path / "ran"
    index.write_bytes(f"cpathlib\nPath.touch\n(cpathlib\nPath\n(V{ran}\ntRtR.".encode())
    assert find_damage(index.parent, FORMAT) == ".metadata is damaged"
    assert not ran.exists()


@pytest.mark.parametrize("text", ["", "six", "-1", "6.0", "\x00\x00"])
def test_damaged_tracker_is_refused(folder, text):
    (folder / TRACKER).write_text(text)
    with pytest.raises(UsageError, match=r"must hold the number of a step; .*pass --ckpt-step 6"):
        check_loadable(folder, None, FORMAT)
    check_loadable(folder, 6, FORMAT)


def test_load_of_a_step_that_was_not_saved_is_refused(folder):
    with pytest.raises(UsageError, match=r"iter_0000005, named by --ckpt-step, .* no such folder.*--ckpt-step 4"):
        check_loadable(folder, 5, FORMAT)


def test_checkpoints_without_a_tracker_are_refused(folder):
    (folder / TRACKER).unlink()
    with pytest.raises(UsageError, match=r"no file latest_.*Complete there: steps 2, 4, 6\. .*write 6 into"):
        check_loadable(folder, None, FORMAT)


@pytest.mark.parametrize("leftover", [None, "incomplete_iter_0000004", "iter_0000004"])
def test_run_without_complete_checkpoint_starts_from_beginning(tmp_path, leftover):
    if leftover is not None:
        (tmp_path / leftover).mkdir()
    check_loadable(tmp_path, None, FORMAT)
    check_loadable(tmp_path / "none", None, FORMAT)


def test_checkpoints_of_other_formats_are_checked(folder):
    torch_format, dcp_format = folder / "iter_0000004", folder / "iter_0000002"
    shutil.rmtree(torch_format)
    part = torch_format / "mp_rank_00" / "model_optim_rng.pt"
    part.parent.mkdir(parents=True)
    torch.save({"weight": torch.zeros(9)}, part)
    assert zipfile.is_zipfile(part)
    assert find_damage(torch_format, "torch") is None
    cut(part)
    assert find_damage(torch_format, "torch") == "mp_rank_00/model_optim_rng.pt is truncated"
    (dcp_format / "metadata.json").unlink()
    assert find_damage(dcp_format, "torch_dcp") is None
    cut(dcp_format / "__0_0.distcp")
    assert find_damage(dcp_format, "torch_dcp").startswith("__0_0.distcp is truncated")


def saved(folder, one_checkpoint, step: int) -> None:
    shutil.copytree(one_checkpoint, folder / f"incomplete_iter_000000{step}")
    (folder / f"incomplete_iter_000000{step}" / "new").touch()


@pytest.mark.parametrize("step", [6, 8])
def test_writing_the_tracker_publishes_the_checkpoint(folder, one_checkpoint, step):
    """Also one of the same step: then the old one gives way."""
    saved(folder, one_checkpoint, step)
    with writing_tracker(folder / TRACKER) as file:
        file.write(str(step))
    assert (folder / TRACKER).read_text() == str(step)
    assert (folder / f"iter_000000{step}" / "new").exists()
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        {TRACKER, "iter_0000002", "iter_0000004", "iter_0000006", f"iter_000000{step}"}
    )


@pytest.mark.parametrize("failing", ["publish", "os.fsync"])
def test_failed_save_keeps_the_old_tracker(folder, one_checkpoint, monkeypatch, failing):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    saved(folder, one_checkpoint, 8)
    monkeypatch.setattr(f"{publishing.__name__}.{failing}", full)
    with pytest.raises(OSError, match="No space"), writing_tracker(folder / TRACKER) as file:
        file.write("8")
    assert (folder / TRACKER).read_text() == "6"
    assert not (folder / "iter_0000008").exists()
    assert not list(folder.glob(".*"))


def test_leftover_of_a_failed_save_is_removed(folder, one_checkpoint):
    saved(folder, one_checkpoint, 6)
    remove_leftover(folder, 6)
    assert not list(folder.glob("incomplete_*"))
    assert complete_steps(folder, FORMAT) == [2, 4, 6]


def test_checkpoint_link_is_replaced_and_its_target_kept(folder, one_checkpoint, tmp_path):
    target = folder / "kept"
    (folder / "iter_0000006").rename(target)
    (folder / "iter_0000006").symlink_to(target)
    saved(folder, one_checkpoint, 6)
    publish(folder, 6)
    assert not (folder / "iter_0000006").is_symlink()
    assert find_damage(target, FORMAT) is None
