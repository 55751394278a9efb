"""Models and plans whose messages have rounded hidden states."""

from megatron_lancet.schedule.comm_dtype import CommDtype
from megatron_lancet.schedule.plan import fixed_plan
from tests.features.case import Case
from tests.features.dedup.cases import THREE as DEDUP_THREE

CASES: dict[str, Case] = {
    "fp8-messages/k=1": Case({}, fixed_plan(1), comm_dtype=CommDtype.FP8),
    "fp8-messages/k=3/dedup": Case({}, DEDUP_THREE, comm_dtype=CommDtype.FP8),
}
"""Runs with ``--lancet-comm-dtype fp8``."""
IN_ROUNDS = Case({}, fixed_plan(1), comm_dtype=CommDtype.FP8, max_rows=40)
"""With a bound of the rows that a rank's experts work on at a time."""
