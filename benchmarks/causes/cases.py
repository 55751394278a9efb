"""What is injected, and how much of it. Neither torch nor Megatron."""

from benchmarks.harness.cases import Case, Shape, select
from megatron_lancet.lab.causes.replay import Cause
from megatron_lancet.schedule.plan import DwPolicy, Plan, fixed_plan

BASELINE = "k1"
"""By what it waits for, the link's rate is set: stock's order."""
PLANS: dict[str, Plan] = {BASELINE: fixed_plan(1, DwPolicy.NONE), "k2": fixed_plan(2)}
"""The runs of a case take turns with these."""
SHAPE = Shape(hidden=384, seq_length=256)
EXPOSED_SHARE = 0.25
"""Of stock's order, without an injected cause."""

SIZES: dict[Cause, tuple[float, ...]] = {
    Cause.ROWS: (0.55, 0.65, 0.45, 0.60, 0.50),
    Cause.PACE: (0.40, 0.50, 0.30, 0.35, 0.45),
    Cause.WIRE: (2.0, 3.0, 1.7, 2.5, 1.5),
    Cause.HOST: (20.0, 15.0, 30.0, 10.0, 40.0),
}
"""By cause, what is injected in each run: the share of the first of four experts; the share of a core that a busy loop
next to rank 1 takes; the divisor of the link's rate; ms that rank 0 sleeps in front of each layer's router."""
_TITLES = {
    Cause.ROWS: "the routers' bias sends more rows to the first expert",
    Cause.PACE: "a busy loop runs on the core of rank 1",
    Cause.WIRE: "the link's rate is lower",
    Cause.HOST: "rank 0 sleeps in front of each layer's router",
}
CASES = {str(cause): Case(str(cause), _TITLES[cause], EXPOSED_SHARE, tuple(PLANS), SHAPE, BASELINE) for cause in SIZES}


def choose(cases: list[str]) -> list[Case]:
    """The cases to run, in the order of :data:`CASES`.

    Args:
        cases: names; empty for all.

    Raises:
        UsageError: an unknown name.
    """
    return select(CASES, cases, list(PLANS), None)
