"""Recipes of fp8 under plans with pairing, in steps of Megatron's schedule beside stock, EP=2 on two ranks.

Usage: fp8_pairs_worker.py RESULT.json RECIPE...; each rank writes RESULT.json.<rank>.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.patching import around, replaced
from megatron_lancet.schedule.plan import paired
from tests.parity.gradients import gradients_worker
from tests.parity.gradients.gradients_worker import plan_of
from tests.parity.te import fp8_worker
from tests.parity.te.fp8_worker import RECIPES, compared, run
from tests.ranks.worker import finish, run_on_cpu_with_te

_NUM_MICRO_BATCHES = 4


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """As the training script's: takes the next samples, and returns the output and what makes a loss of it."""

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = output.float().mean()
        return mean, {"loss": mean.detach()}

    return model(**{"attention_mask": None, **next(batches)}), loss


def step(ddp: Any) -> list[float]:
    """One step of Megatron's schedule without an optimizer: losses; gradients stay in main_grad."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import schedules

    ddp.config.no_sync_func, ddp.config.finalize_model_grads_func = ddp.no_sync, finalize_model_grads
    ddp.zero_grad_buffer()
    with replaced(gradients_worker, "NUM_MICRO_BATCHES", _NUM_MICRO_BATCHES):
        found = schedules.forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=gradients_worker.micro_batches(),
            model=[ddp],
            num_microbatches=_NUM_MICRO_BATCHES,
            seq_length=gradients_worker.SEQ_LENGTH,
            micro_batch_size=gradients_worker.MICRO_BATCH,
        )
    return [entry["loss"].item() for entry in found]


def main() -> None:
    """Compares one and two chunks of the recipes that the command line names, and counts the backwards' waits."""
    from megatron.core import parallel_state

    from megatron_lancet.runtime.progress.pairing import Pairing
    from megatron_lancet.training.megatron.paired_schedules import paired_schedules

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, create_gloo_process_groups=False)
    setups, num_waits = [], 0

    def overlapping_model(stock: Callable[..., Any], *args: Any) -> Any:
        setup, stats = stock(*args)
        setups.append(setup)
        return setup, stats

    def backward_waits(stock: Callable[..., None], pairing: Any) -> None:
        nonlocal num_waits
        num_waits += 1
        stock(pairing)

    result: dict[str, Any] = {}
    with (
        replaced(fp8_worker, "step", step),
        around(fp8_worker, "overlapping_model", overlapping_model),
        around(Pairing, "backward_waits", backward_waits),
        paired_schedules(lambda: setups[-1].stages),
    ):
        for name in sys.argv[2:]:
            settings = RECIPES[name].settings
            stock = run({key: value for key, value in settings.items() if not key.startswith("recompute")})
            for num_chunks in (1, 2):
                num_waits = 0
                ours = run(settings, paired(plan_of(num_chunks)), [one.weights for one in stock.steps])
                result[f"{name}/k={num_chunks}"] = {**compared(ours, stock), "num_waits": num_waits}
    finish(result)


if __name__ == "__main__":
    run_on_cpu_with_te(main, (9, 0))
