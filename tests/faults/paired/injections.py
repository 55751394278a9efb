"""Injects faults into paired steps: does every rank end within the timeout, and do the lines name the right culprit?

Usage: python -m tests.faults.paired.injections --count 200 [--seed 0] [--at-once 2]

Each injection is a training of two ranks of its own, forked from a process that has imported everything. Kind of fault,
plan and rank take turns; the places are drawn among all boundaries of a step, by kind of boundary and by lane in turn.
"""

import argparse
import itertools
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.faults.paired.boundaries import KINDS, OUT_OF_MEMORY, SIGNALS
from tests.faults.paired.step import NUM_MICRO_BATCHES, PLANS
from tests.faults.paired.worker import SILENCE_S
from tests.ranks import launch
from tests.ranks.preloaded import Rank

WORKER = launch.REPO / "tests/faults/paired/worker.py"
NUM_RANKS = 2
ENDS_WITHIN_S = 40.0
"""From the start of the ranks, on a busy machine; a run without a fault takes one second on an idle one."""
_STATUS = {"exception": 1, "kill": -9, "interrupt": 130, "terminate": 143}


@dataclass(frozen=True)
class Injection:
    """One fault.

    Attributes:
        plan: key of ``PLANS``.
        kind: kind of the fault.
        rank: the rank that meets it.
        place: label of the boundary.
        is_in_last_backward: whether it is in the last micro-batch's backward, which reduces the gradients.
    """

    plan: str
    kind: str
    rank: int
    place: str
    is_in_last_backward: bool

    @property
    def lane(self) -> str:
        """``forward`` or ``backward``: which of the two runs there."""
        is_forward = ".F." in self.place or " F." in self.place or self.place.startswith(("data", "loss"))
        return "forward" if is_forward else "backward"


@dataclass(frozen=True)
class Outcome:
    """How the ranks of an injection ended.

    Attributes:
        seconds: from the start of the ranks until the last one has ended.
        problem: what was not as expected; empty if all was.
        culprit_named: whether the other rank's last line names the faulty one; gloo's errors in the reduction of
            gradients don't.
    """

    injection: Injection
    seconds: float
    problem: str
    culprit_named: bool


def boundaries(plan: str, folder: Path) -> list[str]:
    """The labels of all boundaries of an undisturbed step."""
    labels = folder / "labels"
    launch.check(launch.run(WORKER, [plan, "", 0, "", labels], NUM_RANKS, folder, ENDS_WITHIN_S))
    return labels.read_text().splitlines()


def drawn(places: dict[str, list[str]], count: int, seed: int) -> list[Injection]:
    """The first ``count`` of a fixed order of injections.

    Args:
        places: labels of all boundaries, by plan.
    """
    orders = {plan: itertools.cycle(_in_turn(labels, seed)) for plan, labels in places.items()}
    choices = itertools.cycle(itertools.product(range(NUM_RANKS), KINDS, PLANS))
    last_losses = {plan: labels.index(f"loss#{NUM_MICRO_BATCHES}") for plan, labels in places.items()}
    injections = []
    for rank, kind, plan in itertools.islice(choices, count):
        place = next(orders[plan])
        injections.append(Injection(plan, kind, rank, place, places[plan].index(place) >= last_losses[plan]))
    return injections


def _in_turn(labels: Sequence[str], seed: int) -> list[str]:
    """The labels in an order in which kinds of boundaries and lanes take turns."""
    groups: dict[str, list[str]] = {}
    for label in labels:
        groups.setdefault(re.sub(r"L\d+\.|c\d+\.|#\d+|W\..*", "", label), []).append(label)
    dice = random.Random(seed)
    for group in groups.values():
        dice.shuffle(group)
    names = sorted(groups)
    dice.shuffle(names)
    rows = itertools.zip_longest(*(groups[name] for name in names))
    return [label for row in rows for label in row if label is not None]


def inject(injection: Injection, folder: Path) -> Outcome:
    """Runs one injection, with the ranks' output in ``folder``."""
    start_s = time.monotonic()
    arguments = [injection.plan, injection.kind, injection.rank, injection.place, folder / "labels"]
    ranks = launch.start(WORKER, arguments, NUM_RANKS, folder)
    statuses: list[int | None] = [None] * NUM_RANKS
    try:
        for index, rank in enumerate(ranks):
            if injection.kind != "stop" or index != injection.rank:
                statuses[index] = _wait(rank, start_s + ENDS_WITHIN_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    seconds = time.monotonic() - start_s
    outputs = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(NUM_RANKS)]
    problem = "; ".join(_problems(injection, statuses, outputs))
    named = f": rank {injection.rank} " in outputs[1 - injection.rank].rpartition("error: ")[2]
    return Outcome(injection, seconds, problem, named)


def _wait(rank: Rank, deadline_s: float) -> int | None:
    try:
        return rank.wait(max(0.1, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _problems(injection: Injection, statuses: Sequence[int | None], outputs: Sequence[str]) -> list[str]:
    """What was not as expected."""
    faulty, other = injection.rank, 1 - injection.rank
    problems = []
    if statuses[other] != 1:
        problems.append(f"rank {other} {_status(statuses[other])}")
    if injection.kind != "stop" and statuses[faulty] != _STATUS[injection.kind]:
        problems.append(f"faulty rank {faulty} {_status(statuses[faulty])}")
    if problems:
        return problems
    if not re.fullmatch(_line_of_other(injection), _last_line(outputs[other])):
        problems.append(f"rank {other}: {_last_line(outputs[other])!r}")
    if injection.kind not in ("stop", "kill") and not re.fullmatch(
        _line_of_faulty(injection), _last_line(outputs[faulty])
    ):
        problems.append(f"faulty rank {faulty}: {_last_line(outputs[faulty])!r}")
    return problems


def _status(status: int | None) -> str:
    return f"did not end in {ENDS_WITHIN_S:g} s" if status is None else f"ended with {status}"


def _line_of_other(injection: Injection) -> str:
    """Pattern of the other rank's last line."""
    other, faulty = 1 - injection.rank, injection.rank
    what = f"sent nothing for {SILENCE_S:g} s" if injection.kind == "stop" else "closed the connection"
    op = r"L\d\.c\d\.[FI]\.\w+ \(layer \d, chunk \d, .*\) of micro-batch [123]"
    in_exchange = rf"gave up on {op}: rank {faulty} {what}\. The output .*"
    if not injection.is_in_last_backward:
        return f"error: rank {other} {in_exchange}"
    # gloo's own words, which name an address and no rank.
    in_reduction = r"in a step, past L1\.c\d\.I\.dispatch .*: RuntimeError: .*([Cc]losed|reset|Timed out|timed out).*"
    return rf"error: rank {other}(,)? ({in_exchange}|{in_reduction})"


def _line_of_faulty(injection: Injection) -> str:
    """Pattern of the faulty rank's last line, where it can write one."""
    position = r".*"
    label = injection.place.partition("#")[0]
    if label.startswith(("launched", "waiting for", "past")):
        position = rf".*{re.escape(label)} .*"
    if injection.kind == "exception":
        return rf"error: rank {injection.rank}, in a step, {position}: RuntimeError: {re.escape(OUT_OF_MEMORY)}"
    return rf"error: {SIGNALS[injection.kind].name} ended rank {injection.rank}, in a step, {position}"


def _last_line(output: str) -> str:
    return (output.splitlines() or [""])[-1]


def run(count: int, seed: int, at_once: int, folder: Path) -> list[Outcome]:
    """Runs ``count`` injections, ``at_once`` of them side by side."""
    launch.preloaded()
    places = {plan: boundaries(plan, folder / plan) for plan in PLANS}
    injections = drawn(places, count, seed)
    folders = [folder / str(index) for index in range(count)]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(inject, injections, folders))


def table(outcomes: Sequence[Outcome]) -> str:
    """What happened, by kind of fault, as a table in Markdown."""
    rows = [
        "| fault | injections | in a forward, in a backward | as expected | names the culprit | slowest |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        own = [outcome for outcome in outcomes if outcome.injection.kind == kind]
        if not own:
            continue
        lanes = Counter(outcome.injection.lane for outcome in own)
        as_expected = sum(not outcome.problem for outcome in own)
        named = sum(outcome.culprit_named for outcome in own)
        slowest_s = max(outcome.seconds for outcome in own)
        counts = f"{len(own)} | {lanes['forward']}, {lanes['backward']} | {as_expected} | {named}"
        rows.append(f"| {kind} | {counts} | {slowest_s:.1f} s |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(arguments.count, arguments.seed, arguments.at_once, Path(folder))
    for outcome in outcomes:
        if outcome.problem:
            sys.stdout.write(f"{outcome.injection}: {outcome.problem}\n")
    sys.stdout.write(table(outcomes) + "\n")
    sys.exit(any(outcome.problem for outcome in outcomes))


if __name__ == "__main__":
    main()
