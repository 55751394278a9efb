"""How far a narrow wire moved the gradients of a step, for logs and reports: ``--lancet-wire`` against exact."""

import re
from dataclasses import dataclass

from megatron_lancet.schedule.wire import Wire

OTHER_PARAMETERS = "others"
_KINDS = {
    "expert weights": r"\.experts\.",
    "routers": r"\.router\.",
    "attention layers": r"\.self_attention\.",
    "norms": r"layer_?norm|norm\.",
    "embeddings": r"(^|\.)embedding\.",
    "output layer": r"(^|\.)output_layer\.",
}
"""Parameters by what their names contain; the first that fits counts."""
KINDS = (*_KINDS, OTHER_PARAMETERS)


def kind_of_parameter(name: str) -> str:
    """One of :data:`KINDS`, by the parameter's name in Megatron's model."""
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name)), OTHER_PARAMETERS)


@dataclass(frozen=True)
class WireError:
    """Gradients of one step with the narrow wire against those with the exact one, on the same weights and data.

    Attributes:
        step: the step, counted from the first of the process; None if none was checked.
        error: norm of the difference over the norm of the exact gradients, of all parameters; None if none was checked.
        error_by_kind: the same of the parameters of each kind that the model has.
        why_not: why no step was checked, as the end of a sentence; None if one was.
    """

    wire: Wire
    step: int | None = None
    error: float | None = None
    error_by_kind: dict[str, float] | None = None
    why_not: str | None = None

    def as_text(self) -> str:
        """Returns one line."""
        if self.error is None or self.error_by_kind is None:
            return f"wire={self.wire}: the error of gradients was not measured, since {self.why_not}"
        kinds = ", ".join(f"{kind} {_percent(error)}" for kind, error in self.error_by_kind.items())
        return (
            f"wire={self.wire}: gradients of step {self.step} differ from exact ones by {_percent(self.error)} "
            f"of their norm ({kinds})"
        )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
