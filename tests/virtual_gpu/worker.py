"""All cases on the virtual GPU, in one process.

Usage: worker.py RESULT.json [--te]. Rank 0 of a mocked world writes RESULT.json.0: what each case has shown.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.ranks.worker import run_on_cpu, run_on_cpu_with_te
from tests.virtual_gpu.case import Case, Found, run
from tests.virtual_gpu.cases import CASES, TE_CASES

TE_FLAG = "--te"


def shown(found: Found) -> dict[str, Any]:
    """What a case has shown, as JSON."""
    return {
        "loss": found.loss,
        "gradients": found.gradients,
        "problems": [f"{problem.kind}: {problem.text}" for problem in found.problems],
        "host_waits": [[dataclasses.asdict(wait) for wait in step] for step in found.host_waits],
    }


def run_all(cases: dict[str, Case]) -> dict[str, Any]:
    results = {}
    for name, case in cases.items():
        start_s = time.process_time()
        results[name] = shown(run(case)) | {"seconds": time.process_time() - start_s}
    return results


def main() -> None:
    torch.set_num_threads(1)
    results = run_all(TE_CASES if TE_FLAG in sys.argv else CASES)
    Path(f"{sys.argv[1]}.0").write_text(json.dumps(results))


if __name__ == "__main__":
    (run_on_cpu_with_te if TE_FLAG in sys.argv else run_on_cpu)(main)
