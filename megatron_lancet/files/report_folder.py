"""The folder of ``--lancet-report``: tried before the first step; an earlier run's files are moved aside.

Rank 0 alone writes there, so it alone checks.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from megatron_lancet.errors import UsageError

REPORT_FILE = "report.json"
PLAN_FILE = "plan.json"
PROFILE_FILE = "profile.json"
REPORT_FILES = (REPORT_FILE, PLAN_FILE, PROFILE_FILE)
"""Files of a report; features have more, see :attr:`~megatron_lancet.feature.Feature.report_files`."""
_EARLIER = "earlier_{number}"


def check_report_folder(folder: Path | None) -> None:
    """Creates the folder on rank 0, and tries to write there.

    Raises:
        UsageError: nothing can be written there, which would show only when the training is done.
    """
    if folder is None or not is_rank_0():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError:
        raise UsageError(f"--lancet-report {folder}: expected a folder, found a file. Name another folder.") from None
    except OSError as error:
        raise UsageError(
            f"--lancet-report {folder}: can't write there: {error.strerror}. Name a folder that this user can write to."
        ) from error


def cleared(folder: Path | None, names: Sequence[str], note: Callable[[str], None]) -> Path | None:
    """Moves an earlier run's files out of the way of a report on rank 0.

    Args:
        note: prints a line for the user.

    Returns:
        The folder; None if they can't be moved, so that nothing may be written over them.
    """
    with training_counts_more(folder):
        if folder is not None and is_rank_0():
            earlier = _set_aside(folder, names)
            if earlier is not None:
                note(f"Megatron-Lancet report: the report of an earlier run is now in {earlier}")
        return folder
    return None


def _set_aside(folder: Path, names: Sequence[str]) -> Path | None:
    """Moves these files into a new folder ``earlier_N`` beside them, so that files of two runs never mix.

    Returns:
        The new folder; None if there are no such files.
    """
    found = [folder / name for name in names if (folder / name).exists()]
    if not found:
        return None
    number = next(n for n in count(1) if not (folder / _EARLIER.format(number=n)).exists())
    earlier = folder / _EARLIER.format(number=number)
    earlier.mkdir()
    for path in found:
        path.rename(earlier / path.name)
    return earlier


@contextmanager
def training_counts_more(folder: Path | None) -> Iterator[None]:
    """Inside the context rank 0 writes a report; a failure is a line on stderr, because the training itself is done."""
    try:
        yield
    except OSError as error:
        if folder is None or not is_rank_0():
            raise
        reason = error.strerror or error
        sys.stderr.write(f"warning: the training is done, but its report can't be written to {folder}: {reason}\n")


def is_rank_0() -> bool:
    """Whether this is the first rank. Process groups decide; where there are none, the variable ``RANK`` does.

    Under srun alone there is no such variable, and Megatron-Bridge has each rank's number from SLURM.
    """
    distributed = sys.modules.get("torch.distributed")  # not imported: tools read the names above without torch
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return int(os.environ.get("RANK", "0")) == 0
