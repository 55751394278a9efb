"""The table of whole trainings: what ``--lancet-plan auto`` brings in each case, and how it compares."""

from benchmarks.auto.cases import AUTO, CASES, SAME, USERS
from benchmarks.auto.summary import TRAINING_STEPS, CaseSummary, summarise
from benchmarks.harness.tables import markdown
from benchmarks.quoted.cells import NO_RESULT, linked, quartiles
from benchmarks.quoted.results import Quoted, newest

_FOLDER = "../benchmarks/results"
"""Path from docs/performance.md to the result files."""


def auto() -> str:
    """Every measured case, from its newest result."""
    lines = [["case", "stock's step", "stock waits", "`auto` against stock (quartiles)"]]
    lines[0] += ["against stock as a user has it", "of the fastest fixed plan's step", "tuning", "its plan"]
    lines[0] += [f"{TRAINING_STEPS} steps at", "losses"]
    for case, quoted, found in _found():
        chosen, reference = found.variants[AUTO], found.variants[SAME]
        users = found.variants[USERS].step_ms / chosen.step_ms
        lines.append(
            [
                linked(case, quoted),
                f"{reference.step_ms:.0f} ms",
                f"{reference.waited_share:.0%}",
                quartiles(chosen.speedup),
                f"{users:.2f}",
                f"{found.to_best.median:.3f} (`{found.best}`)",
                f"{found.num_tuning_steps} steps",
                chosen.plan,
                f"{found.time_to_step:.0%}",
                f"{found.max_loss_difference:.0e}",
            ]
        )
    return markdown(lines) if len(lines) > 1 else NO_RESULT


def _found() -> list[tuple[str, Quoted, CaseSummary]]:
    return [(case, quoted, summarise(quoted.case)) for case, quoted in newest("auto").items()]


def headline() -> str:
    """Every measured case, for docs/performance.md."""
    lines = [["training", "stock waits", "`auto` against stock", "the same against stock as a user has it"]]
    lines[0] += ["waits under `auto`", "measured"]
    for case, quoted, found in _found():
        chosen, reference = found.variants[AUTO], found.variants[SAME]
        lines.append(
            [
                f"{CASES[case].described} (`{case}`)",
                f"{reference.waited_share:.0%}",
                quartiles(chosen.speedup),
                f"{found.variants[USERS].step_ms / chosen.step_ms:.2f}",
                f"{chosen.waited_share:.0%}",
                f"[{quoted.date}]({_FOLDER}/{quoted.file}){quoted.mark}",
            ]
        )
    return markdown(lines) if len(lines) > 1 else NO_RESULT


def sentence() -> str:
    """The range over the cases, for the README."""
    cases = _found()
    if not cases:
        return NO_RESULT
    each = [
        f"{found.variants[AUTO].speedup.median:.2f} with {CASES[case].described}, where stock waits for "
        f"{found.variants[SAME].waited_share:.0%} of its step{quoted.mark}"
        for case, quoted, found in cases
    ]
    return (
        "> **How many times as fast as stock a training with `--lancet-plan auto`, the default, is: "
        f"{'; '.join(each)}.** "
        "Stock has the same attention kernel and transport. Each ratio is a median of paired steps."
    )


TABLES = {"auto": auto, "auto-headline": headline, "auto-sentence": sentence}
