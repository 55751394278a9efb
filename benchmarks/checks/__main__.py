"""What ``lancet check`` finds: ``python -m benchmarks.checks [--random N] [--output FILE]``.

Each known bug must be found with its axis and the name of a wrong tensor. In each random launch, ours must equal stock,
or stock is equal and there is no overlap to compare. Exits with status 1 otherwise.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checks.bugs import BASE, BUGS, Bug
from benchmarks.checks.launches import random_launch
from benchmarks.harness.origin import finished, origin
from megatron_lancet.lab.check.check import Finding, Verdict, check
from megatron_lancet.lab.check.ranks import FailedRunError, RefusedRunError
from megatron_lancet.lab.check.shrink import Shrunk, shrink
from megatron_lancet.lab.check.words import read_command_line

_TIMEOUT_S = 300.0
_MAX_RANKS = 8
_NO_ALARM = (Verdict.EQUAL, Verdict.NOT_COMPARED)
"""Passing verdicts of a random launch; some launches have no overlap."""


def check_bug(bug: Bug) -> dict[str, Any]:
    """Checks the launch of a bug: what was found, and whether that is right."""
    shrunk = shrink(read_command_line([*BASE, *bug.flags.split()]), None, _MAX_RANKS, bug.padding)
    finding, seconds = _timed(shrunk, prepare=bug.prepare, padding=bug.padding, with_ours=bug.is_ours)
    causes = finding.culprit.axes if finding.culprit is not None else []
    wrong = finding.ours if bug.is_ours else finding.stock
    assert wrong is not None, finding.why_not_ours
    is_found = any(bug.shown in name for name in wrong.wrong) and set(bug.causes) <= set(causes)
    is_found = is_found and not (bug.is_ours and finding.stock.differs)
    worst = next(iter(wrong.parameters.items()))
    return {
        "name": bug.name,
        "what": bug.what,
        "same_fault_as": bug.same_fault_as,
        "injected": bug.prepare is not None,
        "found": is_found,
        "layout": str(shrunk.layout),
        "of_the_overlap": bug.is_ours,
        "num_wrong": len(wrong.wrong),
        "worst": worst,
        "grad_norm": wrong.grad_norm,
        "causes": causes,
        "num_runs": finding.num_runs,
        "seconds": seconds,
    }


def check_random(seed: int) -> dict[str, Any]:
    """Checks a launch drawn at random, the overlap as well."""
    shrunk = shrink(read_command_line(random_launch(seed)), None, _MAX_RANKS)
    try:
        finding, seconds = _timed(shrunk)
    except (RefusedRunError, FailedRunError) as error:
        return {"seed": seed, "layout": str(shrunk.layout), "state": "did not run", "why": str(error)[-500:]}
    return {
        "seed": seed,
        "layout": str(shrunk.layout),
        "state": finding.verdict,
        "stock_error": max(finding.stock.parameters.values()),
        "our_error": max(finding.ours.parameters.values()) if finding.ours is not None else None,
        "why_not_ours": finding.why_not_ours,
        "wrong": finding.stock.wrong[:5] + (finding.ours.wrong[:5] if finding.ours is not None else []),
        "causes": finding.culprit.axes if finding.culprit is not None else [],
        "stock_seeds": finding.stock_seeds,
        "our_seeds": finding.our_seeds,
        "seconds": seconds,
    }


def _timed(shrunk: Shrunk, with_ours: bool = True, **settings: Any) -> tuple[Finding, float]:
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lancet-check") as folder:
        finding = check(shrunk, Path(folder), with_ours, timeout_s=_TIMEOUT_S, **settings)
    return finding, round(time.monotonic() - start_s, 1)


def main() -> int:
    """Prints a line for each bug and each launch."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checks", description=__doc__)
    parser.add_argument("--random", type=int, default=25, metavar="N", help="launches drawn at random (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    parser.add_argument("--no-bugs", action="store_true", help="leave the known bugs out")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write what was found to this file (JSON)")
    options = parser.parse_args()
    started = None if options.output is None else origin("benchmarks.checks")
    bugs = [] if options.no_bugs else [_said(check_bug(bug)) for bug in BUGS]
    drawn = [_said(check_random(options.seed + index)) for index in range(options.random)]
    print(summary(bugs, drawn))
    if options.output is not None:
        assert started is not None
        found = {**finished(started), "bugs": bugs, "random": drawn}
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    is_right = all(one["found"] for one in bugs) and all(one["state"] in _NO_ALARM for one in drawn)
    return 0 if is_right else 1


def summary(bugs: Sequence[Mapping[str, Any]], drawn: Sequence[Mapping[str, Any]]) -> str:
    """Returns the last line: the numbers of found cases and distinct faults, and the verdicts of random launches."""
    same = {bug.name: bug.same_fault_as or bug.name for bug in BUGS}
    found = [one["name"] for one in bugs if one["found"]]
    num_distinct = len({same[name] for name in found})
    states = Counter(str(one["state"]) for one in drawn)
    of_launches = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    return (
        f"{len(found)} of {len(bugs)} cases of bugs found, {num_distinct} distinct faults; of {len(drawn)} random "
        f"launches: {of_launches}"
    )


def _said(found: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
