"""Packed documents in Transformer Engine's layers against stock with the same documents."""

from contextlib import nullcontext
from typing import Any

import pytest

from tests.gradient_deviations import TOLERANCE
from tests.parity.documents.cases import CORE_RECOMPUTE, LAYOUTS, PREDICTIONS, ROPE, Case
from tests.parity.documents.documents_worker import compare
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.gradients_worker import plan_of
from tests.parity.gradients.variants import MLA, VARIANTS
from tests.parity.te.variants import TE
from tests.ranks import launch

pytestmark = pytest.mark.distributed

CASES: dict[str, Case] = {
    "rope/k=1": Case(ROPE, plan_of(1)),
    "mla/k=2": Case(MLA, plan_of(2)),
    "sample-losses/k=2": Case(VARIANTS["two-aux-losses"], plan_of(2)),
    "core-recompute/k=2": Case({**ROPE, **CORE_RECOMPUTE}, plan_of(2)),
    "predictions/k=2/gate": Case(PREDICTIONS, plan_of(2, over="gate", dim="sequence")),
}


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    with parallel(LAYOUTS["EP2"]) as config:
        return {
            name: compare(case._replace(overrides={**config, **TE, **case.overrides}), nullcontext, {})
            for name, case in CASES.items()
        }


results = launch.results(all_results, 2, timeout_s=150, te=launch.Te())
"""Per rank: what is found for each case."""


@pytest.mark.parametrize("name", CASES)
def test_te_gradients_equal_stock_with_the_same_documents(results, name, check_gradients):
    for rank, result in enumerate(results):
        found = result[name]
        assert found["zero_gradients"] == []
        check_gradients(found["gradients"], TOLERANCE, f"rank {rank}")
        assert max(found["loss"], found["evaluation"], found["logged"]) <= TOLERANCE
