"""The demo's output folder."""

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_lancet.errors import UsageError
from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.files.report_folder import REPORT_FILE

REPOSITORY = Path(__file__).resolve().parents[2]


class Folder:
    """Paths of the demo's files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mark = root / ".megatron-lancet-demo"
        self.data = root / "data"
        self.corpus = self.data / "corpus.jsonl"
        self.tokenizer = self.data / "tokenizer.model"
        self.dataset = self.data / "stdlib_text_document"
        self.prepared = self.data / "prepared.json"
        self.checkpoints = root / "checkpoints"
        self.cache = root / "cache"
        self.prepare_log = root / "prepare.log"
        self.train_log = root / "train.log"
        self.stock_log = root / "stock.log"
        self.report = root / REPORT_FILE
        self.picture = root / "loss_curve.png"
        self.timelines = root / "steps.png"
        self.summary = root / "summary.json"
        self.sample = root / "sample.json"

    @property
    def results(self) -> tuple[Path, ...]:
        """Files of one training."""
        logs = self.train_log, self.stock_log
        return *logs, self.report, self.picture, self.timelines, self.summary, self.sample


def open_folder(root: Path) -> Folder:
    """Creates the output folder and removes the results of an earlier demo from it.

    Raises:
        UsageError: the folder can't be created, or has content that is not a demo's.
    """
    folder = Folder(root)
    try:
        if root.exists() and not folder.mark.exists() and any(root.iterdir()):
            raise UsageError(f"{root} is not empty and not of this demo; pass another folder with --output")
        folder.data.mkdir(parents=True, exist_ok=True)
        folder.mark.touch()
    except OSError as error:
        raise UsageError(f"cannot use {root} as output folder: {error.strerror}; pass another with --output") from error
    for trained in (folder.checkpoints, folder.cache):
        shutil.rmtree(trained, ignore_errors=True)
    for result in folder.results:
        result.unlink(missing_ok=True)
    return folder


def shown(path: Path) -> str:
    """Returns a path relative to the current folder, if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def write_json(values: dict[str, Any], path: Path) -> None:
    """Writes ``path`` atomically."""
    atomic_write(path, json.dumps(values, indent=2) + "\n")
