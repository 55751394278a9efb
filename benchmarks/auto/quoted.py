"""The table of whole trainings: what ``--lancet-plan auto`` brings in each case, and how it compares."""

from collections.abc import Sequence

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
    found = [(summary, quoted.mark) for _, quoted, summary in _found()]
    if not found:
        return NO_RESULT
    speedups = sorted(f"{one.variants[AUTO].speedup.median:.2f}" for one, _ in found)
    users = sorted(f"{one.variants[USERS].step_ms / one.variants[AUTO].step_ms:.2f}" for one, _ in found)
    waits = sorted(f"{one.variants[SAME].waited_share:.0%}" for one, _ in found)
    left = sorted((one.variants[AUTO].waited_share for one, _ in found))
    marks = sorted({mark.strip() for _, mark in found} - {""})
    return (
        f"> **Trainings with `--lancet-plan auto`, the default, are {_range(speedups)} times as fast as stock where "
        f"stock waits for {_range(waits)} of its step.** Stock has our attention kernel and transport; against stock "
        f"as a user has it, {_range(users)} times. Ours waits for {_range([f'{share:.0%}' for share in left])} of its "
        f"step. Medians of paired steps in {len(found)} cases on CPU ranks "
        f"([all](docs/performance.md#whole-trainings)){'; ' + ', '.join(marks) if marks else ''}."
    )


def _range(texts: Sequence[str]) -> str:
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


TABLES = {"auto": auto, "auto-headline": headline, "auto-sentence": sentence}
