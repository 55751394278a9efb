"""The table of whole trainings: what ``--lancet-plan auto`` brings in each case, and how it compares."""

import re
import statistics
from collections.abc import Sequence

from benchmarks.auto.cases import AUTO, CASES, MEGATRON, MEGATRON_DELAYED, SAME
from benchmarks.auto.summary import TRAINING_STEPS, CaseSummary, summarise
from benchmarks.harness.tables import markdown
from benchmarks.quoted.cells import NO_RESULT, linked, quartiles
from benchmarks.quoted.results import Quoted, all_runs, newest

_FOLDER = "../benchmarks/results"
"""Path from docs/performance.md to the result files."""
_MUCH = 0.3
"""Share of stock's step from which on its waits are what decides."""
_CHOICES = {
    "pairs": "paired",
    "pairs with chunks at the ends of a step": "at the ends",
    "sequence chunks": "dim=sequence",
    "batch chunks": r"chunks=[2-9]\d* dim=batch",
    "one row per token and rank": "dispatch=dedup",
    "two hops": "dispatch=two-hop",
    "deferred weight gradients": "dw=fill",
    "another attention kernel": "attention=fused",
    "several segments": r"^layers ",
    "a range narrower than the stack": "range=(experts|gate)",
    "tiles": "tiles=",
}
"""What a plan may have, and its text there."""


def auto() -> str:
    """Every measured case, from its newest result."""
    lines = [["case", "stock's step", "stock waits", "`auto` against stock (quartiles)"]]
    lines[0] += ["against stock as a user has it", "of the step of the fastest fixed plan", "tuning", "its plan"]
    lines[0] += ["predicted", f"{TRAINING_STEPS} steps at", "losses"]
    for case, quoted, found in _found():
        chosen, reference = found.variants[AUTO], found.variants[SAME]
        lines.append(
            [
                linked(case, quoted),
                f"{reference.step_ms:.0f} ms",
                f"{reference.waited_share:.0%}",
                quartiles(chosen.speedup),
                _against_users(found),
                f"{_to_best(found)} (`{found.best}`, of {found.num_fixed})",
                f"{found.num_tuning_steps} steps",
                chosen.plan,
                "-" if found.prediction_error is None else f"{found.prediction_error:+.1%}",
                f"{found.time_to_step:.0%}{'' if found.counts_planning else ' without planning'}",
                f"{found.max_loss_difference:.0e}",
            ]
        )
    sentences = f"{_on_best_plans()} {_on_predictions()} {_on_choices()}"
    return f"{markdown(lines)}\n\n{sentences}" if len(lines) > 1 else NO_RESULT


def _to_best(found: CaseSummary) -> str:
    error = "" if found.to_best_error is None else f" ± {found.to_best_error:.3f}"
    return f"{found.to_best.median:.3f}{error}"


def _on_best_plans() -> str:
    ratios = [found.to_best.median for _, _, found in _found()]
    return (
        f"± is the standard error over the turns of a case. In the geometric mean of {len(ratios)} cases a step of "
        f"`auto` takes {statistics.geometric_mean(ratios):.3f} of the fastest fixed plan's. Among equal plans chance "
        f"decides which one is the fastest.{_on_same_plans()}"
    )


def _on_same_plans() -> str:
    ratios = [found.to_same.median for _, _, found in _found() if found.to_same is not None]
    if not ratios:
        return ""
    return (
        f" In {len(ratios)} cases a fixed plan is the plan of `auto`: two processes with one plan differ by "
        f"{_range([100 * abs(ratio - 1) for ratio in ratios], '.1f')} %, which ± does not have."
    )


def _on_predictions() -> str:
    errors = [abs(error) for _, _, found in _found() for error in found.prediction_errors.values()]
    return (
        f"In these races {len(errors)} plans had a predicted and a measured step: the median error is "
        f"{statistics.median(errors):.1%}, the largest {max(errors):.0%}."
        if errors
        else "No plan had a predicted and a measured step."
    )


def _on_choices() -> str:
    plans = [found.variants[AUTO].plan for _, _, found in _found()]
    counts = {name: sum(re.search(text, plan) is not None for plan in plans) for name, text in _CHOICES.items()}
    words = ("never", "once")
    chosen = (f"{name} {words[count] if count < 2 else f'{count} times'}" for name, count in counts.items())
    return f"In {len(plans)} chosen plans: {', '.join(chosen)}."


def _found() -> list[tuple[str, Quoted, CaseSummary]]:
    return [(case, quoted, summarise(quoted.case)) for case, quoted in newest("auto").items()]


def headline() -> str:
    """The cases for docs/performance.md."""
    lines = [["training", "stock waits", "`auto` against stock", "the same against stock as a user has it"]]
    lines[0] += ["Megatron's overlap against stock", "waits under `auto`", "measured"]
    for case, quoted, found in _found():
        chosen, reference = found.variants[AUTO], found.variants[SAME]
        lines.append(
            [
                f"{CASES[case].described} (`{case}`)",
                f"{reference.waited_share:.0%}",
                quartiles(chosen.speedup),
                _against_users(found),
                _megatrons(case),
                f"{chosen.waited_share:.0%}",
                f"[{quoted.date}]({_FOLDER}/{quoted.file}){quoted.mark}",
            ]
        )
    return markdown(lines) if len(lines) > 1 else NO_RESULT


def sentence() -> str:
    """The ranges over the cases, for the README: those in which stock waits for much of its step stand apart."""
    found = [(summary, quoted.mark) for _, quoted, summary in _found()]
    if not found:
        return NO_RESULT
    summaries = sorted((one for one, _ in found), key=_waits, reverse=True)
    parts = [[one for one in summaries if (_waits(one) >= _MUCH) is is_much] for is_much in (True, False)]
    clauses = [
        f"{_range([100 * _waits(one) for one in part], '.0f')} % of its step, they are "
        f"{_range([one.variants[AUTO].speedup.median for one in part], '.2f')} times as fast"
        for part in parts
        if part
    ]
    against_users = [one.against_users.median for one in summaries if one.against_users is not None]
    left = _range([100 * one.variants[AUTO].waited_share for one in summaries], ".0f")
    marks = "".join(f"; some are {mark}" for mark in sorted({mark.strip() for _, mark in found} - {""}))
    return (
        f"> **Trainings with `--lancet-plan auto`, the default, against stock: where stock waits for "
        f"{'; where it waits for '.join(clauses)}.** Stock has our attention kernel and transport; against stock as a "
        f"user has it, measured in {len(against_users)} of the cases, {_range(against_users, '.2f')} times. Ours waits "
        f"for {left} % of its step. Medians of paired steps in {len(found)} cases on CPU ranks (`sudo make "
        f"bench-auto`; [results](docs/performance.md#whole-trainings)){marks}."
    )


def _against_users(found: CaseSummary) -> str:
    """``auto`` against stock as a user has it; a dash where that did not run."""
    return "-" if found.against_users is None else f"{found.against_users.median:.2f}"


def _megatrons(case: str) -> str:
    """Megatron's own overlap, without and with delayed dW, and ``auto`` in the same turns; a dash where neither ran."""
    cells = []
    for name, words in {MEGATRON: "", MEGATRON_DELAYED: " with delayed dW"}.items():
        runs = [one for one in all_runs("auto") if one.case["name"] == case and name in one.case["variants"]]
        if runs:
            variants = summarise(runs[-1].case).variants
            source = f"[{runs[-1].date}]({_FOLDER}/{runs[-1].file}){runs[-1].mark}"
            beside = f"`auto` {variants[AUTO].speedup.median:.2f} beside it, {source}"
            cells.append(f"{quartiles(variants[name].speedup)}{words} ({beside})")
    return "; ".join(cells) or "-"


def _waits(summary: CaseSummary) -> float:
    return summary.variants[SAME].waited_share


def _range(values: Sequence[float], digits: str) -> str:
    low, high = (format(value, digits) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


TABLES = {"auto": auto, "auto-headline": headline, "auto-sentence": sentence}
