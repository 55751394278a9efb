"""What is traced, profiled, predicted and measured. No torch."""

from benchmarks.harness.cases import Case, Shape
from benchmarks.prediction.cases import BASELINE

PLANNED = "from-trace"
"""The configuration that the planner chooses for the profile from the traces."""
CONFIGURATIONS = ("k1", "stack-k2-dw", "sequence-k2-dw", PLANNED)
_SHAPE = Shape(hidden=384, seq_length=256)
CASES = {
    case.name: case
    for case in (
        Case("45", "balanced routing, k1 exposes 45 %", 0.45, CONFIGURATIONS, _SHAPE, BASELINE),
        Case("20", "balanced routing, k1 exposes 20 %", 0.20, CONFIGURATIONS, _SHAPE, BASELINE),
    )
}
DEFAULT_CASES = ("45",)
