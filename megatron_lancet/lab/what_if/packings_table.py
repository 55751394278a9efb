"""Formats predictions of steps of documents, packed in several ways, as text, Markdown and JSON."""

from typing import Any

from megatron_lancet.files.records import to_plain
from megatron_lancet.lab.what_if.packings import Packings
from megatron_lancet.report.tables import right_aligned

_HEAD = ["packing", "micro-batches", "step ms", "tokens/s", "of the first", "spread over ranks", "padding"]


def as_text(found: Packings) -> str:
    """Returns the setting and a table with columns aligned to the right."""
    return f"{_setting(found)}\n\n" + "\n".join(right_aligned(_table(found)))


def as_markdown(found: Packings) -> str:
    """Returns a Markdown table."""
    head, *lines = _table(found)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---:"] * len(head), *lines])


def as_plain(found: Packings) -> dict[str, Any]:
    """Returns everything for ``json.dumps``."""
    plain = to_plain(found)
    assert isinstance(plain, dict)
    return {**plain, "plan": str(found.plan)}


def _setting(found: Packings) -> str:
    setting = found.setting
    return (
        f"plan: {found.plan}\n"
        f"{setting.num_documents} documents of {found.mean_length:.0f} tokens in the mean on each of "
        f"{setting.num_ranks} ranks, {setting.num_micro_batches} micro-batches of {setting.max_tokens} tokens, EP "
        f"{setting.ep_size}; {found.num_steps} steps drawn\n"
        f"attention to a position costs {found.cost.tokens_per_pair:.3g} tokens (--lancet-pack-attention-cost)"
    )


def _table(found: Packings) -> list[list[str]]:
    lines = [
        [
            step.name,
            f"{step.num_micro_batches:.0f}",
            f"{step.step_ms:.1f}",
            f"{step.tokens_per_s:.0f}",
            f"{step.over_first:.2f}",
            f"{100 * step.spread:.1f} %",
            f"{100 * step.padding:.0f} %",
        ]
        for step in found.steps
    ]
    return [_HEAD, *lines]
