"""Delayed scaling, whose state is global, where a forward is under way during each backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from megatron_lancet.patching import around, replaced
from megatron_lancet.schedule.plan import paired
from tests.gradient_deviations import TOLERANCE
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.gradients_worker import plan_of
from tests.parity.paired.paired_worker import step
from tests.parity.te import fp8_worker
from tests.parity.te.fp8_worker import NUM_STEPS, RECIPES, compared, run
from tests.ranks import launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(500)]

_NUM_MICRO_BATCHES = 4
IN_FP32 = ("delayed-in-fp32", "delayed-in-fp32-recompute")
"""Activations are fp32, so that nothing but the order of sums differs."""
RECOMPUTED = "delayed-recompute"
NUM_WAITS = NUM_STEPS * 4 * 3 * 2
"""Of one chunk: steps, micro-batches, layers, dispatch and combine."""


def all_results() -> dict[str, Any]:
    """Compares one and two chunks of the recipes, and counts the backwards' waits."""
    from megatron_lancet.features.pairing.pairing import Pairing
    from megatron_lancet.features.pairing.schedules import paired_schedules

    setups, num_waits = [], 0

    def overlapping_model(stock: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        setup, stats = stock(*args, **settings)
        setups.append(setup)
        return setup, stats

    def backward_waits(stock: Callable[..., None], pairing: Any) -> None:
        nonlocal num_waits
        num_waits += 1
        stock(pairing)

    result: dict[str, Any] = {}
    with (
        parallel({"expert_model_parallel_size": 2}),
        replaced(fp8_worker, "step", partial(step, num_micro_batches=_NUM_MICRO_BATCHES)),
        around(fp8_worker, "overlapping_model", overlapping_model),
        around(Pairing, "backward_waits", backward_waits),
        paired_schedules(lambda: setups[-1].stages),
    ):
        for name in (*IN_FP32, RECOMPUTED):
            settings = RECIPES[name].settings
            stock = run({key: value for key, value in settings.items() if not key.startswith("recompute")})
            for num_chunks in (1, 2):
                num_waits = 0
                ours = run(settings, paired(plan_of(num_chunks)), [one.weights for one in stock.steps])
                result[f"{name}/k={num_chunks}"] = {**compared(ours, stock), "num_waits": num_waits}
    return result


results = launch.results(all_results, 2, timeout_s=400, te=launch.Te())


@pytest.mark.parametrize(("recipe", "num_chunks"), [*((name, k) for name in IN_FP32 for k in (1, 2)), (RECOMPUTED, 1)])
def test_scales_and_gradients_of_paired_steps_are_stocks(results, recipe, num_chunks, check_gradients):
    """A context of fp8 that a recomputation opens must not show in the forward paired with it."""
    for result in results:
        found = result[f"{recipe}/k={num_chunks}"]
        assert found["num_waits"] == num_chunks * NUM_WAITS
        assert found["num_scaling"] > 0
        assert found["other_scaling"] == []
        assert found["num_stashed"] == 0
        assert found["loss"] == 0
        for gradients in found["gradients"]:
            check_gradients(gradients, 0.0 if num_chunks == 1 else TOLERANCE, recipe, "fp8")
