"""The plan that a run found, as text in its checkpoint, so that a resumed run need not search again."""

import json
from dataclasses import dataclass

from megatron_lancet.files.reader import differences, parse_record
from megatron_lancet.files.records import to_plain
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.schedule.plan import PLAN_VERSION, Plan
from megatron_lancet.training.observe.step_stats import StepStats

TUNED_PLAN_VERSION = f"2.{PLAN_VERSION}"
ATTRIBUTE = "lancet_tuned_plan"
"""Name among Megatron's arguments, which are saved with every checkpoint: plain text, so that stock can load it too."""
_MAX_LISTED = 4
_MAX_CHARS = 60


@dataclass(frozen=True)
class TunedPlan:
    """A plan that was chosen by measurement, and the run that it was chosen for.

    Attributes:
        made_for: what the choice depended on, by name: model, layout, device, versions, the user's limits.
        chosen: measured under the plan when it was chosen.
        baseline: measured without overlap; None if that was never measured.
        prediction: None if nothing was predicted.
    """

    plan: Plan
    made_for: dict[str, str]
    chosen: StepStats
    baseline: StepStats | None = None
    prediction: StepEstimate | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({"version": TUNED_PLAN_VERSION, **to_plain(self)})

    @staticmethod
    def from_json(text: str, where: str) -> "TunedPlan":
        """Reads what :meth:`to_json` wrote.

        Raises:
            RecordError: the text is damaged, or of another version.
        """
        return parse_record(TunedPlan, text, TUNED_PLAN_VERSION, "the tuned plan", where)

    def misfit(self, made_for: dict[str, str]) -> str | None:
        """How a run differs from the plan's run, for example ``seq_length was 32, is 64``; None if it does not."""
        found = differences(self.made_for, made_for)
        texts = [f"{name} was {_short(before)}, is {_short(now)}" for name, (before, now) in found]
        more = [f"{len(texts) - _MAX_LISTED} more"] if len(texts) > _MAX_LISTED else []
        return "; ".join([*texts[:_MAX_LISTED], *more]) or None


def _short(text: str | None) -> str:
    if text is None:
        return "not known"
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
