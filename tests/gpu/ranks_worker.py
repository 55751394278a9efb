"""The small model on several ranks against stock, on GPUs over NCCL, else over gloo: ranks_worker.py RESULT.json."""

import os
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from megatron_lancet.schedule.plan import DwPolicy, fixed_plan
from megatron_lancet.training.platform.cpu import gpu_available
from tests.gpu.small_model import compare
from tests.ranks.worker import finish, run_on_cpu

EP = 2
PLANS = {"k=2": [fixed_plan(2)], "dw-at-once-then-deferred": [fixed_plan(1, DwPolicy.NONE), fixed_plan(2)]}


def main(on_gpu: bool) -> None:
    from megatron.core import parallel_state

    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=EP, create_gloo_process_groups=False)
    results = {}
    for name, plans in PLANS.items():
        found = compare(plans, {"expert_model_parallel_size": EP}, device, nullcontext)
        results[name] = {
            "loss": found.loss,
            "gradients": found.gradients,
            "num_reports": found.num_reports,
            "num_all_to_alls": found.times.num_all_to_alls,
        }
    finish(results)


if __name__ == "__main__":
    if gpu_available():
        main(on_gpu=True)
    else:
        run_on_cpu(partial(main, on_gpu=False))
