"""The table of whole trainings: what ``--lancet-plan auto`` brings in each case, and how it compares."""

from benchmarks.auto.cases import AUTO, SAME, USERS
from benchmarks.auto.summary import TRAINING_STEPS, summarise
from benchmarks.harness.tables import markdown
from benchmarks.quoted.cells import NO_RESULT, linked, quartiles
from benchmarks.quoted.results import newest


def auto() -> str:
    """Every measured case, from its newest result."""
    lines = [["case", "stock's step", "stock waits", "`auto` against stock (quartiles)"]]
    lines[0] += ["against stock as a user has it", "of the fastest fixed plan's step", "tuning", "its plan"]
    lines[0] += [f"{TRAINING_STEPS} steps at", "losses"]
    for case, quoted in newest("auto").items():
        found = summarise(quoted.case)
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


TABLES = {"auto": auto}
