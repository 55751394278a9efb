"""The short demo's claim: a sentence and its conditions, built from summary.json."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.demo.folder import Folder
from benchmarks.demo.links.link import PACED
from benchmarks.demo.training_log.train_log import results_text

_ATTENTION = {
    "DotProductAttention": "Megatron's unfused core attention",
    "SdpaAttention": "torch's fused attention",
}
_COLUMNS = 118


def headline(summary: Mapping[str, Any]) -> str:
    """Returns the figures without their conditions."""
    low, high = summary["speedup_quartiles"]
    return (
        f"stock waited {_share(summary, 'stock_'):.0f} % of its step, ours {_share(summary):.0f} %: "
        f"{summary['speedup']:.2f}x faster (quartiles {low:.2f} to {high:.2f})"
    )


def claim(summary: Mapping[str, Any]) -> str:
    """Returns one sentence with the figures and their link."""
    low, high = summary["speedup_quartiles"]
    difference = summary["max_loss_difference"]
    equality = f"to {difference:.0e}".replace("e-0", "e-") if difference else "to the bit"
    found = f"{_share(summary, 'stock_'):.0f} %"
    wanted = summary["wanted_share"]
    if wanted is None:
        link = f"a link ({summary['link']}) on which stock waits for {found} of its step"
    else:
        paced = "a paced transport" if summary["link"].startswith(PACED) else "a link"
        link = f"{paced} set so that stock waits for {100 * wanted:.0f} % of its step ({found} in this run)"
    return (
        f"On {link}, ours is {summary['speedup']:.2f}x faster (quartiles {low:.2f} to {high:.2f}) and waits for "
        f"{_share(summary):.0f} % of its step; losses agree {equality}."
    )


def conditions(summary: Mapping[str, Any]) -> str:
    """Returns the setup that both variants share, our plan and the number of steps."""
    plan = " ".join(summary["plan"].split()[:2])
    return (
        f"Both run the same attention kernel ({attention_text(summary)}), reduce gradients over the link of the "
        f"all-to-alls, and keep freed memory between steps. Ours runs a fixed plan ({plan}). The figures are medians "
        f"over {summary['num_measured_steps']} steps of each, in turns; a ratio is of two steps with the same number."
    )


def disturbance_text(summary: Mapping[str, Any]) -> str:
    """Returns reasons to doubt the figures: other load, a changed machine speed; empty if there are none."""
    speed = summary["origin"].get("machine_speed")
    changed = [f"the machine's speed changed by {speed['change']:.0%}"] if speed and speed["is_disturbed"] else []
    return "; ".join([*([summary["other_load"]] if summary["other_load"] else []), *changed])


def attention_text(summary: Mapping[str, Any]) -> str:
    """Describes the core attention of both variants."""
    return _ATTENTION.get(summary["attention"], summary["attention"])


def closing_text(summary: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """Returns the last lines of the demo.

    Args:
        files: paths of the output files, by kind.
    """
    wanted = summary["wanted_share"]
    setting = "as asked for" if wanted is None else f"set so that stock waits for {100 * wanted:.0f} % of its step"
    lines = [
        results_text(summary),
        f"  stock              {summary['stock_step_ms']:.0f} ms a step, "
        f"{_share(summary, 'stock_'):.1f} % of it waiting for all-to-alls",
        f"  link               {summary['link']}, {setting}",
        f"  reductions         on the same link: {summary['stock_reduced_ms']:.0f} ms of stock's step, "
        f"{summary['reduced_ms']:.0f} ms of ours",
        f"  attention          {attention_text(summary)}, in both",
        "  allocator          glibc keeps freed memory between steps, in both: MALLOC_ settings in the summary",
        *([f"  DISTURBED          {disturbed}"] if (disturbed := disturbance_text(summary)) else []),
        *(f"  {what:<18} {path}" for what, path in files.items()),
        "",
        textwrap.fill(f"{claim(summary)} {conditions(summary)}", _COLUMNS),
    ]
    if disturbed:
        lines.append(
            "(The machine was not quiet. Run the demo again when nothing else uses the processor, for true figures.)"
        )
    return "\n".join(lines)


def _share(summary: Mapping[str, Any], prefix: str = "") -> float:
    """Returns the percentage of a step in which compute waits for all-to-alls."""
    return 100 * float(summary[f"{prefix}exposed_ms"] / summary[f"{prefix}step_ms"])


def files_of(folder: Folder) -> dict[str, Path]:
    """Returns the demo's output files, by the names in :func:`closing_text`."""
    return {
        "both steps": folder.timelines,
        "loss curve": folder.picture,
        "summary": folder.summary,
        "logs": folder.train_log,
    }
