"""A model of virtual pipeline stages, which DDP wraps one by one: stock, and with the installed overlap; four ranks."""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.library import launchers
from megatron_lancet.training.megatron.patches import fused_core_attention
from megatron_lancet.training.platform.cpu import cpu_platform
from tests.parity.launchers.launchers_worker import batches, forward_step, policy_loss
from tests.parity.paired.paired_cases import PIPELINES
from tests.parity.paired.paired_layouts_worker import build_stages

NUM_MICRO_BATCHES = (4, 2)
SETTINGS = {**PIPELINES["EP2xPP2"], "variable_seq_lengths": True, "moe_layer_freq": [0, 1, 1, 1]}
"""The first stage of the first rank has no experts."""


def trained() -> list[Any]:
    """Losses and gradients of the steps."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with fused_core_attention(True):  # Megatron's local attention has no documents
        models, config, _ = build_stages(SETTINGS)
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=4000)
    stages = [
        DistributedDataParallel(config, ddp_config, model, disable_bucketing=index > 0)
        for index, model in enumerate(models)
    ]
    config.no_sync_func, config.finalize_model_grads_func = [stage.no_sync for stage in stages], finalize_model_grads
    found: list[Any] = []
    for step, number in enumerate(NUM_MICRO_BATCHES):
        for stage in stages:
            stage.zero_grad_buffer()
        results = get_forward_backward_func()(
            forward_step_func=partial(forward_step, loss_of=policy_loss),
            data_iterator=[iter(batches(step, number, packs=True)) for _ in stages],
            model=stages,
            num_microbatches=number,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        found += [result["loss"] for result in results]
        found += [weight.main_grad.clone() for model in models for weight in model.parameters()]
    return found


def main() -> None:
    out = Path(sys.argv[1])
    with cpu_platform():
        from megatron.core import parallel_state

        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, expert_model_parallel_size=2
        )
        expected = trained()
        os.environ["LANCET_FLAGS"] = "--lancet-num-chunks 1 --lancet-pairing on"
        overlap = launchers.install_from_environment()
        found = trained()
        own = {
            "num_apart": sum(not torch.equal(one, other) for one, other in zip(found, expected, strict=True)),
            "num_tensors": len(found),
            "stages": len(overlap._run.setup.stages),
            "num_steps": overlap.num_steps_done,
            "tokens": overlap._run.recorder.records[-1].num_tokens,
            "peak_dw_bytes": overlap._run.recorder.records[-1].comm.peak_dw_bytes,
            "plan": overlap.plan_text,
        }
        launchers.close()
        (out / f"{dist.get_rank()}.json").write_text(json.dumps(own))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
