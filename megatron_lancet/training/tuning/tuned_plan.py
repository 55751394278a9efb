"""The plan that a run found, as text that travels in its checkpoint: a resumed run need not search again."""

import json
from dataclasses import dataclass

from megatron_lancet.files import differences, parse_record, to_plain
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.schedule.plan import PLAN_VERSION, Plan
from megatron_lancet.training.tuning.step_stats import Figures

TUNED_PLAN_VERSION = f"2.{PLAN_VERSION}"
ATTRIBUTE = "lancet_tuned_plan"
"""Of Megatron's arguments, which it saves with every checkpoint: plain text there, so that stock can load it too."""
_MAX_LISTED = 4
_MAX_CHARS = 60


@dataclass(frozen=True)
class TunedPlan:
    """A plan that was chosen by measurement, and what for.

    Attributes:
        made_for: what the choice depended on, by name: model, layout, device, versions, the user's limits.
        chosen: figures under it when it was chosen.
        baseline: figures without overlap; None if they were never measured.
        prediction: None if nobody predicted it.
    """

    plan: Plan
    made_for: dict[str, str]
    chosen: Figures
    baseline: Figures | None = None
    prediction: StepEstimate | None = None

    def to_json(self) -> str:
        """As one line of JSON."""
        return json.dumps({"version": TUNED_PLAN_VERSION, **to_plain(self)})

    @staticmethod
    def from_json(text: str, where: str) -> "TunedPlan":
        """What :meth:`to_json` wrote.

        Raises:
            RecordError: the text is damaged, or of another version.
        """
        return parse_record(TunedPlan, text, TUNED_PLAN_VERSION, "the tuned plan", where)

    def misfit(self, made_for: dict[str, str]) -> str | None:
        """In what a run differs from the one that the plan was chosen for; None if it does not.

        For example ``seq_length was 32, is 64``.
        """
        texts = [
            f"{name} was {_short(before)}, is {_short(now)}"
            for name, (before, now) in differences(self.made_for, made_for)
        ]
        more = [f"{len(texts) - _MAX_LISTED} more"] if len(texts) > _MAX_LISTED else []
        return "; ".join([*texts[:_MAX_LISTED], *more]) or None


def _short(text: str | None) -> str:
    if text is None:
        return "not known"
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
