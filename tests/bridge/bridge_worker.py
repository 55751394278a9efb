"""Megatron-Bridge's own trainings on a CPU rank, stock and with the overlap, one after another in one process."""

import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.features.checkpoints.patches import resumable_distributed_optimizer
from megatron_lancet.runtime.collectives import from_all_ranks
from megatron_lancet.training.megatron.patches import fused_core_attention
from megatron_lancet.training.platform.cpu import cpu_platform
from tests.bridge import gaps

SET_BY_BRIDGE = ("no_sync_func", "grad_sync_func", "finalize_model_grads_func", "grad_scale_func", "timers")
"""Fields of a model's configuration that keep Bridge from building another local model by it."""


class FailedStepError(Exception):
    """A failure in the middle of a training."""


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Trains as a case says; ``fails_at``: a step, ``then_stock``: once more with the same configuration, in stock.

    Returns:
        Losses and norms of the steps, losses of evaluations, a digest of each rank's weights and their names, how
        Bridge's export takes modules to be spread over ranks, the plan of the last step and the number of its steps.
    """
    from megatron.bridge.training import gpt_step, vlm_step
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils import checkpoint_utils

    from megatron_lancet.library import bridge
    from megatron_lancet.library.overlap import Overlap
    from tests.bridge.configuration import configuration

    found: dict[str, Any] = {"steps": [], "evaluations": []}
    overlaps: list[Overlap] = []

    class Recorded(Callback):
        def on_train_step_end(self, context: Any) -> None:
            found["steps"].append({**_values(context.loss_dict), "norm": context.grad_norm})
            if len(found["steps"]) == case.get("fails_at"):
                del case["fails_at"]  # once
                raise FailedStepError

        def on_eval_end(self, context: Any) -> None:
            found["evaluations"].append(_values(context.total_loss_dict))

        def on_train_end(self, context: Any) -> None:
            found["weights"] = _weights_of_ranks(context.model)
            found["spread"] = {} if case.get("images") else _spread(context.model)
            for overlap in overlaps:
                found.update(line=overlap.line, plan=overlap.plan_text, num_steps=overlap.num_steps_done)

    class Kept(Overlap):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            overlaps.append(self)

    config = configuration(case)
    callbacks: list[Any] = []
    if case.get("settings") is not None:
        bridge.Overlap = Kept  # type: ignore[misc]
        callbacks = bridge.enable(config, **case["settings"])
    forward_step = (vlm_step if case.get("images") else gpt_step).forward_step
    checkpoint_utils.read_train_state.cache_clear()  # a training counts on in what the last one read
    # Megatron's local attention has no documents; ours takes the place of stock's as well.
    with fused_core_attention(case.get("packed", False) and not callbacks):
        with suppress(SystemExit, FailedStepError):
            (finetune if "weights" in case else pretrain)(config, forward_step, callbacks=[Recorded(), *callbacks])
        if case.get("then_stock"):
            found["steps"].clear()
            for name in SET_BY_BRIDGE:
                setattr(config.model, name, None)
            checkpoint_utils.read_train_state.cache_clear()
            pretrain(config, forward_step, callbacks=[Recorded()])
    return found


def _values(losses: Any) -> dict[str, Any]:
    return {name: value.tolist() for name, value in losses.items()}


def _weights_of_ranks(stages: Sequence[torch.nn.Module]) -> list[str]:
    digest = hashlib.sha256()
    for stage in stages:
        for name, weight in stage.named_parameters():
            digest.update(name.encode())
            digest.update(weight.detach().numpy().tobytes())
    return [str(one) for one in from_all_ranks(digest.hexdigest())]


def _spread(stages: Sequence[torch.nn.Module]) -> dict[str, str]:
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    mapping = AutoMapping("a name", "another")
    named = [pair for stage in stages for pair in stage.named_modules()]
    return {name: mapping._detect_parallelism_type(module) for name, module in named if module._parameters}


def main() -> None:
    cases, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    found: dict[str, Any] = {}
    # Stock's distributed optimizer resumes with apex or Transformer Engine only.
    with cpu_platform(), gaps.filled(), resumable_distributed_optimizer():
        from megatron.bridge.peft import utils
        from megatron.bridge.training import initialize

        utils.HAVE_TE = False  # Bridge found the names, which are None in Megatron
        # Bridge has taken it by name before the platform replaced it; the wheel of Megatron has it compiled.
        initialize.compile_helpers = lambda: None
        dist.init_process_group("gloo")
        for name, case in cases.items():
            sys.stdout.write(f"case: {name}\n")
            sys.stdout.flush()
            found[name] = train(case)
            if dist.get_rank() == dist.get_world_size() - 1:  # the last pipeline stage has the losses
                out.write_text(json.dumps(found))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
