"""Packed documents in Transformer Engine's layers, ours beside stock's with the same documents, on two ranks.

Usage: te_worker.py RESULT.json. Each rank writes RESULT.json.<rank>.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist

from tests.parity.documents.cases import CORE_RECOMPUTE, LAYOUTS, PREDICTIONS, ROPE, Case
from tests.parity.documents.documents_worker import NUM_MICRO_BATCHES, compare
from tests.parity.gradients.gradients_worker import plan_of
from tests.parity.gradients.variants import MLA, VARIANTS
from tests.parity.te.variants import TE
from tests.ranks.worker import finish, run_on_cpu_with_te

CASES: dict[str, Case] = {
    "rope/k=1": Case(ROPE, plan_of(1)),
    "mla/k=2": Case(MLA, plan_of(2)),
    "sample-losses/k=2": Case(VARIANTS["two-aux-losses"], plan_of(2)),
    "core-recompute/k=2": Case({**ROPE, **CORE_RECOMPUTE}, plan_of(2)),
    "predictions/k=2/gate": Case(PREDICTIONS, plan_of(2, over="gate", dim="sequence")),
}


def main() -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**LAYOUTS["EP2"], create_gloo_process_groups=False)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / NUM_MICRO_BATCHES)
    overrides = {**LAYOUTS["EP2"], **TE}
    finish(
        {
            name: compare(case._replace(overrides={**overrides, **case.overrides}), nullcontext, {})
            for name, case in CASES.items()
        }
    )


if __name__ == "__main__":
    run_on_cpu_with_te(main)
