"""Every variant of the models with Transformer Engine's layers, stock beside ours, on two ranks.

Usage: worker.py RESULT.json. Each rank writes RESULT.json.<rank>.
"""

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.patching import replaced
from megatron_lancet.schedule.plan import fixed_plan
from tests.parity.gradients.connections import shared_connections
from tests.parity.gradients.disturbances import erratic_wire
from tests.parity.gradients.gradients_worker import NUM_MICRO_BATCHES, build, compare_plan, overlapping_model
from tests.parity.gradients.placed import numbers_in_checkpoints, place
from tests.parity.gradients.variants import VARIANTS
from tests.parity.paired.paired_worker import compare
from tests.parity.te.variants import FUSED, GUARDED, HAZARDS, MOST_ROWS, PAIRED, PLACED, TE, cases
from tests.ranks.worker import finish, run_on_cpu_with_te


def first_call_of_a_step(stack: ExitStack) -> None:
    """Negative control: Transformer Engine's own forward, whose first dW of a step overwrites the gradient."""
    from megatron_lancet.features.te.linear import TELinearPerChunk

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(TELinearPerChunk, self).forward(*args, **kwargs)

    stack.enter_context(replaced(TELinearPerChunk, "forward", forward))


def grad_from_autograd_counts(stack: ExitStack) -> None:
    """Negative control: what autograd finds in ``.grad`` is added, as for Megatron's own linear layers."""
    from megatron_lancet.features.te import linear
    from megatron_lancet.runtime.weight_grad_store import DeferredWeight

    stack.enter_context(replaced(linear._WeightWithPlaceholder, "report", DeferredWeight.report))


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    results: dict[str, Any] = {}
    for name, (overrides, plan) in cases().items():
        results[name] = compare_plan({**TE, **overrides}, plan, erratic_wire if "dw-memory" in name else None)
    repeated = {**TE, **VARIANTS["mtp-repeated"]}
    results["mtp-repeated-fused/k=2"] = compare_plan({**repeated, **FUSED}, fixed_plan(2), against=repeated)
    results["mtp-repeated-fused/stock"] = compare_plan({**repeated, **FUSED}, fixed_plan(2))
    for name, disturb in {"first-call": first_call_of_a_step, "dw-at-once": grad_from_autograd_counts}.items():
        overrides, plan = HAZARDS[name]
        results[f"{name}/damaged"] = compare_plan({**TE, **overrides}, plan, disturb)
    for name, placed in PLACED.items():
        results[name] = compare_plan(placed.overrides, placed.plan, placed=placed)
    model, *_ = build(PLACED["placed/grouped/k=1"].overrides)
    overlapping_model(model, fixed_plan(1))
    place(model, PLACED["placed/grouped/k=1"])
    results["placed/numbers"] = numbers_in_checkpoints(model)
    for name, (overrides, plan) in GUARDED.items():
        results[name] = compare_plan({**TE, **overrides}, plan, max_rows=MOST_ROWS)
    return results | {name: compare(case) for name, case in PAIRED.items()}


def main() -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, create_gloo_process_groups=False)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / NUM_MICRO_BATCHES)
    with shared_connections():
        finish(all_results())


if __name__ == "__main__":
    run_on_cpu_with_te(main)
