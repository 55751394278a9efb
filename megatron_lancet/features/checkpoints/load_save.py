"""Loading and saving as a user sees it: a failure is reported in one line that names a checkpoint which is complete."""

import argparse
import errno
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training.async_utils import maybe_finalize_async_save
from megatron.training.checkpointing import _NON_PERSISTENT_CKPT_SUBDIR
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lancet.checkpoint.files import (
    TRACKER,
    advice,
    complete_steps,
    find_damage,
    find_missing_files,
    load_folder,
    name_of,
    tracked_step,
)
from megatron_lancet.errors import CheckpointError, UsageError, reason_of
from megatron_lancet.features.checkpoints.patches import watched_checkpoints
from megatron_lancet.features.checkpoints.publish import INCOMPLETE, num_bytes_of, remove_leftover
from megatron_lancet.runtime.collectives import from_rank_0
from megatron_lancet.training.process.exit import is_lost_peer

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OTHER_SIZES = ("shape mismatch", "Missing key", "Unexpected key")
"""Words of Megatron and torch about a checkpoint of a model with other sizes or parts."""


def check_before_start(args: argparse.Namespace) -> None:
    """Refuse ``--load`` where files of the named checkpoint are missing. Reads a handful of files.

    Raises:
        UsageError: see :func:`check_loadable`; also if there is no checkpoint under ``--exit-on-missing-checkpoint``.
    """
    folder = _load_folder(args)
    if folder is None:
        return
    check_loadable(folder, args.ckpt_step, args.ckpt_format, find_missing_files)
    if args.exit_on_missing_checkpoint and (args.ckpt_step or tracked_step(folder, args.ckpt_format)) is None:
        raise UsageError(f"--exit-on-missing-checkpoint: there is no checkpoint in {folder}.")


def check_loadable(
    folder: Path, ckpt_step: int | None, ckpt_format: str, find: Callable[[Path, str], str | None] = find_damage
) -> None:
    """Refuse to resume from an incomplete checkpoint, or to start anew in a folder whose checkpoints are untracked.

    Args:
        ckpt_step: the user's ``--ckpt-step``; None for the step that the tracker file names.
        find: :func:`find_damage`, or :func:`find_missing_files` where every rank looks.

    Raises:
        UsageError: names the damage and the checkpoints that are complete. An empty or missing folder is no error:
            the run starts from the beginning, as in stock.
    """
    step = ckpt_step or tracked_step(folder, ckpt_format)
    if step is None:
        if complete_steps(folder, ckpt_format):
            raise UsageError(
                f"{folder} has checkpoints, but no file {TRACKER} says which one is the latest. "
                f"{advice(folder, None, ckpt_format)}"
            )
        return
    checkpoint = folder / name_of(step)
    damage = find(checkpoint, ckpt_format)
    if damage is not None:
        source = "--ckpt-step" if ckpt_step else TRACKER
        raise UsageError(
            f"the checkpoint {checkpoint}, named by {source}, can't be loaded: {damage}. "
            f"{advice(folder, step, ckpt_format)}"
        )


def _load_folder(args: argparse.Namespace) -> Path | None:
    """As :func:`load_folder`; None also with non-persistent checkpoints."""
    if args.non_persistent_ckpt_type is not None:
        return None  # Megatron takes the newer one of two kinds
    return load_folder(args)


def _save_folder(args: argparse.Namespace, is_persistent: bool) -> Path | None:
    """The folder that Megatron will save in; None if it is no plain one, or if each rank has its own."""
    folder = args.save
    if not is_persistent:
        if args.non_persistent_ckpt_type != "global":
            return None
        folder = args.non_persistent_global_ckpt_dir or f"{folder}/{_NON_PERSISTENT_CKPT_SUBDIR}"
    return None if "://" in folder else Path(folder)


class Checkpoints:
    """Checks and reports around Megatron's own loading and saving."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._format: str = args.ckpt_format
        self._write_error: Exception | None = None
        self._begun_step: int | None = None

    def watched(self) -> AbstractContextManager[None]:
        """Inside the context Megatron loads and saves through this object."""
        return watched_checkpoints(self._load, self._save, self._failed_to_write)

    def _load(self, load: Callable[[], Any]) -> Any:
        """Load, on all ranks.

        Raises:
            UsageError: the checkpoint is not complete, which rank 0 checks for all ranks; or a feature refuses it.
            CheckpointError: its content can't be loaded.
        """
        refusal = from_rank_0(self._why_not_loadable)
        if refusal is not None:
            raise UsageError(refusal)
        try:
            return load()
        except UsageError:
            raise
        except SystemExit as request:
            if request.code not in (None, 0):
                raise
            raise CheckpointError(f"can't load the checkpoint in {self._args.load}; Megatron says why above.") from None
        except AssertionError as error:
            raise UsageError(
                f"Megatron refuses the checkpoint in {self._args.load}: {_reason(error)}.{_schedule_advice(error)}"
            ) from error
        except (Exception, CheckpointException) as error:
            folder = _load_folder(self._args)
            raise CheckpointError(
                f"can't load the checkpoint in {folder or self._args.load}: {_reason(error)}. "
                f"Nothing was changed.{self._load_advice(folder, error)}"
            ) from error

    def _why_not_loadable(self) -> str | None:
        folder = _load_folder(self._args)
        if folder is None:
            return None
        try:
            check_loadable(folder, self._args.ckpt_step, self._format, find_damage)
        except (UsageError, OSError) as error:
            return str(error)
        return None

    def _load_advice(self, folder: Path | None, error: BaseException) -> str:
        if any(words in str(_first_cause(error)) for words in _OTHER_SIZES):
            return " The checkpoint is of another model: pass the flags of sizes and layers that it was saved with."
        unfit = folder and (self._args.ckpt_step or tracked_step(folder, self._format))
        steps = [step for step in complete_steps(folder, self._format) if step != unfit] if folder else []
        return f" Another one there is of step {steps[-1]}: --ckpt-step {steps[-1]} loads it." if steps else ""

    def _save(self, step: int, save: Callable[[], Any], is_persistent: bool = True) -> Any:
        """Save, on all ranks.

        Args:
            is_persistent: False for a checkpoint of ``--non-persistent-save-interval``.

        Raises:
            CheckpointError: it could not be saved; the checkpoint before it is still the latest, and complete.
        """
        folder = _save_folder(self._args, is_persistent)
        if folder is None:
            return save()
        if step == self._begun_step:  # as before a larger batch: --async-save may still write the one before
            maybe_finalize_async_save(blocking=True)
        self._begun_step = step
        refusal = from_rank_0(lambda: self._prepare(folder, step, is_persistent))
        if refusal is not None:
            raise CheckpointError(f"the checkpoint of step {step} was not saved: {refusal} {self._latest(folder)}")
        self._write_error = None
        failed_rank = ""
        try:
            return save()
        except CheckpointException as error:  # on all ranks, because some could not write
            failed_rank, failure = self._first_write_error() or ("", _first_cause(error))
        except Exception as error:
            failure = _first_cause(error)
            if not isinstance(failure, OSError) and not is_lost_peer(failure):
                raise
        raise CheckpointError(
            f"the checkpoint of step {step} could not be saved in {folder}: {failed_rank}{_reason(failure)}. "
            f"{_room(folder, failure)}{self._latest(folder)}"
        ) from failure

    def _failed_to_write(self, error: Exception) -> None:
        self._write_error = error

    def _first_write_error(self) -> tuple[str, BaseException] | None:
        """The first rank that could not write, and its error; None if no rank has one. Collective over all ranks."""
        errors: list[tuple[int | None, str] | None] = [None] * dist.get_world_size()
        own = self._write_error
        number = own.errno if isinstance(own, OSError) else None
        dist.all_gather_object(errors, None if own is None else (number, _reason(own)))
        for rank, error in enumerate(errors):
            if error is not None:
                return f"rank {rank}: ", OSError(*error) if error[0] is not None else RuntimeError(error[1])
        return None

    def _prepare(self, folder: Path, step: int, is_persistent: bool) -> str | None:
        """Frees disk space for a checkpoint; returns the missing amount, None if there is enough."""
        try:
            remove_leftover(folder, step)
            if not is_persistent:
                return None  # Megatron frees the space of older ones first
            steps = [int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*") if path.name[5:].isdigit()]
            needed_bytes = num_bytes_of(folder / name_of(max(steps))) if steps else 0
            if not steps or (free_bytes := shutil.disk_usage(folder).free) >= needed_bytes:
                return None
        except OSError as error:
            return f"{error}."
        return (
            f"{folder} has {free_bytes / 1e6:.1f} MB free, and the last checkpoint takes {needed_bytes / 1e6:.1f} MB: "
            "free some space."
        )

    def _latest(self, folder: Path) -> str:
        """Tells the user which checkpoint to resume from."""
        try:
            step = tracked_step(folder, self._format)
        except UsageError:
            step = None
        if step is None:
            return "No checkpoint was saved before."
        return f"The latest checkpoint there is still from step {step}: start again with --load {folder}."


def _reason(error: BaseException) -> str:
    """The first cause of an error, in a few words."""
    cause = _first_cause(error)
    if is_lost_peer(cause):
        return "another rank is gone"
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    text = reason_of(cause).strip().rstrip(".")
    return text if isinstance(cause, AssertionError | RuntimeError) else f"{type(cause).__name__}: {text}"


def _schedule_advice(error: BaseException) -> str:
    """Advice for a learning rate schedule that differs from the checkpoint's; empty for other errors."""
    if "OptimizerParamScheduler" not in str(error):
        return ""
    return (
        " Pass --override-opt_param-scheduler to go on with this run's schedule, or "
        "--use-checkpoint-opt_param-scheduler to keep the checkpoint's."
    )


def _first_cause(error: BaseException) -> BaseException:
    """Follows torch's exceptions of several ranks, causes and contexts to the error that was raised first."""
    failures = getattr(error, "failures", None)
    if failures:
        return _first_cause(next(iter(failures.values()))[0])
    inner = error.__cause__ or (error.__context__ if not error.__suppress_context__ else None)
    return _first_cause(inner) if inner is not None else error


def _room(folder: Path, error: BaseException) -> str:
    """Advice for a full disk; empty for other errors."""
    cause = _first_cause(error)
    if not isinstance(cause, OSError) or cause.errno not in _DISK_FULL:
        return ""
    return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB are free there: free some space; {INCOMPLETE}* can go. "
