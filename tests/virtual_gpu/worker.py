"""Cases or mutants on the virtual GPU, in one process, as rank 0 of a mocked world."""

import dataclasses
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch

from tests.virtual_gpu import mutants
from tests.virtual_gpu.case import Case, run
from tests.virtual_gpu.cases import CASES, DAMAGED, MUTANT_CASES, TE_CASES


def shown(cases: dict[str, Case]) -> dict[str, Any]:
    """What each case has shown, as JSON."""
    results = {}
    for name, case in cases.items():
        start_s = time.process_time()
        found = run(case)
        results[name] = {
            "loss": found.loss,
            "logged": found.logged,
            "gradients": found.gradients,
            "problems": [f"{problem.kind}: {problem.text}" for problem in found.problems],
            "host_waits": [[dataclasses.asdict(wait) for wait in step] for step in found.host_waits],
            "exchanges": sorted(found.exchanges),
            "cpu_s": time.process_time() - start_s,
        }
    return results


def judged() -> dict[str, Any]:
    """Runs each mutant of the product in the report's case, and the cases without a mutant."""
    prepare()
    mutants.learn_orders()
    caught = {row["mutant"]: mutants.fails(row["case"]) for row in _mutated_rows()}
    return {"caught": caught, "clean": {name: mutants.fails(name) for name in MUTANT_CASES}}


def wrong_when_late() -> dict[str, bool]:
    """Whether each mutant makes numbers wrong when the first stream that does so in the report is late."""
    prepare()
    return {
        row["mutant"]: mutants.is_wrong_when_late(row["case"], row["wrong_when_late"][0])
        for row in _mutated_rows()
        if row["wrong_when_late"]
    }


def _mutated_rows() -> Iterator[dict[str, Any]]:
    """Yields each row of the report that has a case, and applies its mutant until the next row is asked for."""
    rows = mutants.reported()
    for mutant, number in mutants.find().items():
        row = rows.get(str(mutant))
        if row and row["case"]:
            with mutants.mutated(mutant, number):
                yield row


def all_shown(te: bool) -> dict[str, Any]:
    """What each case has shown.

    Args:
        te: the cases with Transformer Engine's layers; otherwise the others, and those in which something is wrong.
    """
    prepare()
    if te:
        return shown(TE_CASES)
    damaged = {name: [problem.kind for problem in run(*one).problems] for name, one in DAMAGED.items()}
    return shown(CASES) | damaged


def prepare() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
