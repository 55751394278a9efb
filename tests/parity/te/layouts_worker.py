"""Transformer Engine's layers on four ranks, in each layout: stock beside ours.

Usage: layouts_worker.py RESULT.json. Each rank writes RESULT.json.<rank>.
"""

from typing import Any

import torch.distributed as dist

from tests.parity.gradients import layouts_worker
from tests.parity.gradients.disturbances import erratic_wire
from tests.parity.gradients.layouts_worker import LAYOUTS, compare_in
from tests.parity.te.variants import FUSED, TE
from tests.ranks.worker import finish, run_on_cpu_with_te

SHARDED = {"distributed_optimizer": True}
CASES: dict[str, tuple[str, dict[str, Any], int, Any]] = {
    f"{layout}/{name}": (layout, {**TE, **overrides}, num_chunks, disturb)
    for layout, name, overrides, num_chunks, disturb in (
        ("EP4", "k=1", {}, 1, None),
        ("EP4", "fused/erratic-wire/k=2", FUSED, 2, erratic_wire),
        ("EP2xDP2", "fused/distributed-optimizer/k=1", {**FUSED, **SHARDED}, 1, None),
        ("EP2xDP2", "distributed-optimizer/erratic-wire/k=2", SHARDED, 2, erratic_wire),
        ("EP2xTP2", "k=1", {}, 1, None),
        ("EP2xTP2", "fused/shared-expert/k=3", {**FUSED, **layouts_worker.SHARED_EXPERT}, 3, None),
        ("EP2xTP2", "erratic-wire/k=2", {}, 2, erratic_wire),
        ("EP2xETP2", "k=1", {}, 1, None),
        ("EP2xETP2", "fused/k=2", FUSED, 2, None),
        # Transformer Engine has context parallelism for bf16 and fp16 only.
        *(
            ("EP2xCP2", f"bf16/{kind}/k={k}", {**FUSED, "bf16": True, "cp_comm_type": kind}, k, None)
            for kind in ("p2p", "a2a")
            for k in (1, 2)
        ),
    )
}
"""Layout, overrides of the config, number of chunks, what disturbs the run."""


def main() -> None:
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for layout in LAYOUTS:
        results |= compare_in(layout, CASES)
    finish(results)


if __name__ == "__main__":
    run_on_cpu_with_te(main)
