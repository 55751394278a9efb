"""Cases or mutants on the virtual GPU, in one process, as rank 0 of a mocked world.

Usage: worker.py RESULT.json [--te | --mutants]. It writes RESULT.json.0: what each case has shown, or what the case of
the report says about each mutant.
"""

import dataclasses
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.ranks.worker import run_on_cpu, run_on_cpu_with_te
from tests.virtual_gpu import mutants
from tests.virtual_gpu.case import Case, run
from tests.virtual_gpu.cases import CASES, DAMAGED, MUTANT_CASES, TE_CASES

TE_FLAG, MUTANTS_FLAG = "--te", "--mutants"


def shown(cases: dict[str, Case]) -> dict[str, Any]:
    """What each case has shown, as JSON."""
    results = {}
    for name, case in cases.items():
        start_s = time.process_time()
        found = run(case)
        results[name] = {
            "loss": found.loss,
            "gradients": found.gradients,
            "problems": [f"{problem.kind}: {problem.text}" for problem in found.problems],
            "host_waits": [[dataclasses.asdict(wait) for wait in step] for step in found.host_waits],
            "exchanges": sorted(found.exchanges),
            "cpu_s": time.process_time() - start_s,
        }
    return results


def judged() -> dict[str, Any]:
    """Runs each mutant of the product in the report's case, and the cases without a mutant.

    Another run delays the first stream that makes numbers wrong in the report.
    """
    rows = mutants.reported()
    caught, wrong_when_late = {}, {}
    for mutant, tree in mutants.find().items():
        row = rows.get(str(mutant))
        if row and row["case"]:
            with mutants.mutated(mutant, tree):
                caught[row["mutant"]] = mutants.fails(MUTANT_CASES[row["case"]])
                for stream in row["wrong_when_late"][:1]:
                    wrong_when_late[row["mutant"]] = mutants.is_wrong_when_late(row["case"], stream)
    clean = {name: mutants.fails(case) for name, case in MUTANT_CASES.items()}
    return {"caught": caught, "wrong_when_late": wrong_when_late, "clean": clean}


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results = judged() if MUTANTS_FLAG in sys.argv else shown(TE_CASES if TE_FLAG in sys.argv else CASES)
    if len(sys.argv) == 2:
        results |= {name: [problem.kind for problem in run(*damaged).problems] for name, damaged in DAMAGED.items()}
    Path(f"{sys.argv[1]}.0").write_text(json.dumps(results))


if __name__ == "__main__":
    (run_on_cpu_with_te if TE_FLAG in sys.argv else run_on_cpu)(main)
