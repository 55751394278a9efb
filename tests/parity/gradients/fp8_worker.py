"""Transformer Engine's fp8 recipes with chunks, beside stock and beside fp32 on the same weights, EP=2 on two ranks.

Usage: fp8_worker.py RESULT.json RECIPE...; each rank writes RESULT.json.<rank>. The recipes are names of ``RECIPES``.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.patching import around, replaced
from megatron_lancet.schedule.plan import Plan
from tests.parity.gradients import gradients_worker
from tests.parity.gradients.gradients_worker import (
    NUM_MICRO_BATCHES,
    close,
    gradients,
    logged_losses,
    overlapping_model,
    plan_of,
    step,
    wrap_with_ddp,
)
from tests.ranks.worker import finish, run_on_cpu_with_te
from tests.small_gpt import EXPERTS, SEQ_LENGTH, VOCAB, transformer_config

NUM_STEPS = 2
"""Delayed scaling has no scale yet in the first step."""
_LEARNING_RATE = 0.05
_MODEL = {
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "moe_grouped_gemm": True,
    "normalization": "RMSNorm",
    "expert_model_parallel_size": 2,
    "first_last_layers_bf16": False,
}
FIRST_LAST: dict[str, Any] = {
    "first_last_layers_bf16": True,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
}


class Recipe(NamedTuple):
    """A configuration of fp8, and the plans that it runs by.

    Attributes:
        settings: of Megatron's configuration.
        plans: by name.
        micro_batch: samples; of 16 positions each.
    """

    settings: dict[str, Any]
    plans: dict[str, Plan]
    micro_batch: int = 4


def _fp8(recipe: str, number: str = "hybrid", **settings: Any) -> dict[str, Any]:
    return {"bf16": True, "fp8": number, "fp8_recipe": recipe, **settings}


_WHOLE, _TWO, _FOUR = ({f"k={k}": plan_of(k)} for k in (1, 2, 4))
_SEQUENCE = {"k=2 sequence": plan_of(2, dim="sequence")}
_NO_CACHE: dict[str, Any] = {"disable_parameter_transpose_cache": True}
RECIPES = {
    "delayed": Recipe(_fp8("delayed"), _WHOLE | _TWO | _FOUR),
    "delayed-e4m3": Recipe(_fp8("delayed", "e4m3"), _WHOLE),
    "delayed-in-fp32": Recipe(_fp8("delayed", bf16=False), _TWO | _FOUR),
    "tensorwise": Recipe(_fp8("tensorwise"), _WHOLE | _FOUR | _SEQUENCE),
    "tensorwise-e4m3": Recipe(_fp8("tensorwise", "e4m3"), _WHOLE),
    "tensorwise-first-last-bf16": Recipe(_fp8("tensorwise", **FIRST_LAST), _WHOLE | _TWO),
    "tensorwise-no-cache": Recipe(_fp8("tensorwise", **_NO_CACHE), _TWO),
    "blockwise": Recipe(_fp8("blockwise", "e4m3", hidden_size=128, ffn_hidden_size=128), _WHOLE | _TWO, micro_batch=16),
    "mxfp8": Recipe(_fp8("mxfp8", "e4m3"), _WHOLE | _TWO | _SEQUENCE),
}
IN_FP32 = "delayed-in-fp32"
NO_CACHE = "tensorwise-no-cache"
MXFP8 = "mxfp8"
"""Of Blackwell: in ranks of its own, because a process has one device."""
HOPPER = [name for name in RECIPES if name != MXFP8]


def build(settings: Mapping[str, Any]):
    """Megatron's model of Transformer Engine's layers; gradients are accumulated in the GEMM."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()  # it has the amax histories of all models so far
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = transformer_config(**{**EXPERTS, **_MODEL, **settings})
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization=config.normalization)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ_LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    for module in model.modules():
        # The configuration's switch is for the output layer too, which then asks for apex.
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
    return model, config, (Float16Module if config.bf16 else lambda _, plain: plain)


def scaling(model) -> dict[str, torch.Tensor]:
    """Scales and amax histories of delayed scaling, by module; empty for other recipes."""
    found = {}
    for name, module in model.named_modules():
        for direction, state in getattr(module, "fp8_meta", {}).items():
            for part in ("scale", "amax_history"):
                if hasattr(state, part):
                    found[f"{name}.{direction}.{part}"] = getattr(state, part).clone()
    return found


@contextmanager
def quantized_weights(model) -> Iterator[Counter[str]]:
    """Counts how often each of the model's parameters is quantized."""
    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    counts: Counter[str] = Counter()

    def counted(quantize, tensor, *args, **kwargs):
        if tensor.data_ptr() in names:
            counts[names[tensor.data_ptr()]] += 1
        return quantize(tensor, *args, **kwargs)

    with around(sys.modules["transformer_engine_torch"], "quantize", counted):
        yield counts


@contextmanager
def recorded_puts() -> Iterator[dict[str, int]]:
    """Bytes of each deferred dW of a run's last chunk, by the name of its op."""
    from megatron_lancet.runtime.weight_grad_store import WeightGradStore

    by_name: dict[str, int] = {}

    def recorded(put, store, weights, compute, num_bytes):
        by_name[weights[0].name] = num_bytes
        return put(store, weights, compute, num_bytes)

    with around(WeightGradStore, "put", recorded):
        yield by_name


class Step(NamedTuple):
    """What one step started from, and what it left."""

    weights: dict[str, torch.Tensor]
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    scaling: dict[str, torch.Tensor]
    quantized: dict[str, int]


class Run(NamedTuple):
    """Some steps of a model; of one with deferred dWs also their bytes."""

    steps: list[Step]
    dw_bytes: dict[str, int]
    peak_dw_bytes: int


def run(settings: Mapping[str, Any], plan: Plan | None = None, weights: list[dict[str, torch.Tensor]] | None = None):
    """Runs stock or a plan; each step is on given weights, or on those that the gradients of the last one lead to."""
    model, config, precision = build(settings)
    setup, stats = (None, None) if plan is None else overlapping_model(model, plan)
    ddp = wrap_with_ddp(model, config, precision, setup is not None and setup.delays_weight_grads)
    steps: list[Step] = []
    with quantized_weights(model) as quantized, recorded_puts() as dw_bytes:
        for index in range(NUM_STEPS if weights is None else len(weights)):
            if weights is not None:
                set_weights(model, weights[index])
            elif steps:
                move_weights(model)
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            model.set_is_first_microbatch()
            losses = step(ddp)
            steps.append(Step(before, losses, gradients(model), scaling(model), dict(quantized)))
            quantized.clear()
    peak_bytes = 0
    if stats is not None:
        peak_bytes = stats.take().peak_dw_bytes
        close(stats)
    logged_losses()
    return Run(steps, dict(dw_bytes), peak_bytes)


def set_weights(model, weights: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def move_weights(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.main_grad.to(parameter.dtype), alpha=-_LEARNING_RATE)


def compared(ours: Run, stock: Run) -> dict[str, Any]:
    """How far a run is from stock, in each step."""
    pairs = list(zip(ours.steps, stock.steps, strict=True))
    last = stock.steps[-1].scaling
    return {
        "loss": max(relative_difference(a.losses, b.losses) for a, b in pairs),
        "gradients": [relative_errors(a.gradients, b.gradients) for a, b in pairs],
        "num_scaling": len(last),
        "other_scaling": [name for a, b in pairs for name in b.scaling if not a.scaling[name].equal(b.scaling[name])],
        "moved_scaling": [name for name in last if not last[name].equal(stock.steps[0].scaling[name])],
        "quantized": [a.quantized for a, _ in pairs],
        "quantized_by_stock": [b.quantized for _, b in pairs],
        "dw_bytes": ours.dw_bytes,
        "peak_dw_bytes": ours.peak_dw_bytes,
    }


def errors(gradients_of: Step, truth: Step) -> dict[str, float]:
    """Median and largest error of a parameter's gradient against fp32."""
    found = relative_errors(gradients_of.gradients, truth.gradients).values()
    return {"median": median(found), "worst": max(found)}


def compare(recipe: Recipe) -> dict[str, Any]:
    """Every plan of a recipe, see :func:`compared`; those of several chunks also with fp32 on the same weights."""
    with replaced(gradients_worker, "MICRO_BATCH", recipe.micro_batch):
        stock = run(recipe.settings)
        weights = [one.weights for one in stock.steps]
        runs = {name: run(recipe.settings, plan, weights) for name, plan in recipe.plans.items()}
        plain = {name: value for name, value in recipe.settings.items() if not name.startswith(("fp8", "bf16"))}
        truth = run(plain, weights=weights[-1:]).steps[0]
    return {
        "plans": {name: compared(ours, stock) for name, ours in runs.items()},
        "errors": {name: errors(one.steps[-1], truth) for name, one in {"stock": stock, **runs}.items()},
    }


def main() -> None:
    """Compares the recipes that the command line names."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, create_gloo_process_groups=False)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / NUM_MICRO_BATCHES)
    finish({name: compare(RECIPES[name]) for name in sys.argv[2:]})


if __name__ == "__main__":
    run_on_cpu_with_te(main, (10, 0) if MXFP8 in sys.argv else (9, 0))
