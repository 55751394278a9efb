"""The check on a GPU: its newest committed result, or where there is none, the prediction for it."""

import json

from benchmarks.gpu.check.compare import table
from benchmarks.gpu.check.predict.file import committed, hash_of, read_prediction
from benchmarks.gpu.check.summary import shown
from benchmarks.quoted.results import has_result, newest_file, sourced

NAME = "gpu-check"


def gpu_check() -> str:
    """Returns the parts of the newest check, with predicted beside measured; the prediction alone without a check."""
    if has_result(NAME):
        return sourced(shown(json.loads(newest_file(NAME).read_text())), NAME)
    path = committed("H100")
    head = f"No check on a device is committed. The prediction for an H100 (`{path.name}`, SHA-256 `{hash_of(path)}`):"
    return f"{head}\n\n{table(read_prediction(path), {})}"
