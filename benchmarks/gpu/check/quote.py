"""The check on a GPU: its newest committed result, or where there is none, the prediction for it."""

import json

from benchmarks.gpu.check.compare import table
from benchmarks.gpu.check.predict.file import committed, hash_of, read_prediction
from benchmarks.gpu.check.summary import shown
from benchmarks.provenance import link
from benchmarks.quoted.results import has_result, newest_file

NAME = "gpu-check"


def gpu_check() -> str:
    """Returns the parts of the newest check, with predicted next to measured; the prediction alone without a check."""
    if has_result(NAME):
        file = newest_file(NAME)
        return shown(json.loads(file.read_text()), f" ({link('samples', file, '../benchmarks/results')})")
    path = committed("H100")
    head = f"No check on a device is committed. The prediction for an H100 (`{path.name}`, SHA-256 `{hash_of(path)}`):"
    return f"{head}\n\n{table(read_prediction(path), {})}"
