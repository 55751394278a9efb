"""Transformer Engine's fp8 recipes with chunks, next to stock and to fp32 on the same weights, EP=2 on two ranks."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.patching import around, replaced
from megatron_lancet.schedule.plan import DwPolicy, Plan
from tests.features.dedup.cases import dedup
from tests.parity.gradients import gradients_worker
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.gradients_worker import (
    close,
    gradients,
    logged_losses,
    overlapping_model,
    plan_of,
    step,
    wrap_with_ddp,
)
from tests.parity.te.variants import FUSED, TE

NUM_STEPS = 2
"""Delayed scaling has no scale yet in the first step."""
_LEARNING_RATE = 0.05
_MODEL: dict[str, Any] = {
    **TE,
    **FUSED,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "first_last_layers_bf16": False,
}
FIRST_LAST: dict[str, Any] = {
    "first_last_layers_bf16": True,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
}


RECOMPUTE: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
"""Stock runs without it: Megatron's own checkpoint keeps random states of a GPU."""


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
_WHOLE_DEDUP = {"k=1 dedup": dedup(plan_of(1))}
_SEQUENCE = {"k=2 sequence": plan_of(2, dim="sequence")}
_AT_ONCE = {"k=1 dw=none": plan_of(1, dw="none")}
"""In a run that may switch to plans which defer, as with ``--lancet-plan auto``."""
MTP: dict[str, Any] = {"mtp_num_layers": 1}
_NO_CACHE: dict[str, Any] = {"disable_parameter_transpose_cache": True}
_ONE_EXPERT: dict[str, Any] = {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}
"""One expert per rank: all received rows are its rows, and nothing sorts them."""
_IN_FP32 = _fp8("delayed", bf16=False, fp8_amax_history_len=3, fp8_amax_compute_algo="max")
RECIPES = {
    "delayed": Recipe(_fp8("delayed"), _WHOLE | _WHOLE_DEDUP | _TWO | _FOUR),
    "delayed-one-expert": Recipe(_fp8("delayed", **_ONE_EXPERT), _WHOLE | _WHOLE_DEDUP),
    "delayed-recompute": Recipe(_fp8("delayed", **RECOMPUTE), _WHOLE),
    "delayed-selective-recompute": Recipe(_fp8("delayed", **SELECTIVE), _WHOLE),
    "delayed-e4m3": Recipe(_fp8("delayed", "e4m3"), _WHOLE),
    "delayed-in-fp32": Recipe(_IN_FP32, _TWO | _FOUR),
    "delayed-in-fp32-recompute": Recipe({**_IN_FP32, **RECOMPUTE}, _TWO),
    "tensorwise": Recipe(_fp8("tensorwise"), _WHOLE | _FOUR | _SEQUENCE),
    # Transformer Engine's backward returns biases' gradients to autograd, apart from dWs.
    "tensorwise-biases": Recipe(_fp8("tensorwise", add_bias_linear=True), _WHOLE | _AT_ONCE),
    "tensorwise-recompute": Recipe(_fp8("tensorwise", **RECOMPUTE), _WHOLE),
    "tensorwise-first-last-bf16": Recipe(_fp8("tensorwise", **FIRST_LAST), _WHOLE),
    "delayed-mtp": Recipe(_fp8("delayed", **MTP), _WHOLE),
    "delayed-mtp-recompute": Recipe(_fp8("delayed", **MTP, **RECOMPUTE), _WHOLE),
    "delayed-in-fp32-mtp": Recipe({**_IN_FP32, **MTP}, _TWO),
    "tensorwise-mtp": Recipe(_fp8("tensorwise", **MTP), _WHOLE),
    "delayed-fp8-weights": Recipe(_fp8("delayed", fp8_param=True), _WHOLE),
    "tensorwise-fp8-weights": Recipe(_fp8("tensorwise", fp8_param=True), _WHOLE),
    "tensorwise-no-cache": Recipe(_fp8("tensorwise", **_NO_CACHE), _TWO),
    "blockwise": Recipe(_fp8("blockwise", "e4m3", hidden_size=128, ffn_hidden_size=128), _WHOLE | _TWO, micro_batch=16),
    "mxfp8": Recipe(_fp8("mxfp8", "e4m3"), _WHOLE | _TWO | _SEQUENCE),
    "mxfp8-output": Recipe(_fp8("mxfp8", "e4m3", fp8_output_proj=True), _WHOLE),
}
IN_FP32 = ("delayed-in-fp32", "delayed-in-fp32-recompute")
NO_CACHE = "tensorwise-no-cache"
BLACKWELL = [name for name in RECIPES if name.startswith("mxfp8")]
"""In ranks of their own, because a process has one device."""
HOPPER = [name for name in RECIPES if name not in BLACKWELL]


def build(settings: Mapping[str, Any]):
    """See :func:`gradients_worker.build`; Transformer Engine forgets the amax histories of all models so far."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    return gradients_worker.build({**_MODEL, **settings})


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


def num_stashed() -> int:
    """Scales and amax histories that Transformer Engine keeps for recomputations to come."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return sum(map(len, FP8GlobalStateManager.quantization_state.fp8_tensors_recompute_buffer))


class Step(NamedTuple):
    """What one step started from, and what it left."""

    weights: dict[str, torch.Tensor]
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    scaling: dict[str, torch.Tensor]
    quantized: dict[str, int]


class Run(NamedTuple):
    """Some steps of a model.

    Attributes:
        dw_bytes: bytes of a chunk's deferred dWs, by op.
        num_stashed: scales and histories that were put aside for a recomputation, and are still there.
    """

    steps: list[Step]
    dw_bytes: dict[str, int]
    peak_dw_bytes: int
    num_stashed: int


def run(settings: Mapping[str, Any], plan: Plan | None = None, weights: list[dict[str, torch.Tensor]] | None = None):
    """Runs stock or a plan; each step is on given weights, or on those that the gradients of the last one lead to."""
    model, config, precision = build(settings)
    switchable = plan is not None and plan.dw_policy is DwPolicy.NONE
    setup, stats = (None, None) if plan is None else overlapping_model(model, plan, switchable=switchable)
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
    return Run(steps, dict(dw_bytes), peak_bytes, num_stashed())


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
        "num_stashed": ours.num_stashed,
    }


def errors(gradients_of: Step, truth: Step) -> dict[str, float]:
    """Median and largest error of a parameter's gradient against fp32."""
    found = relative_errors(gradients_of.gradients, truth.gradients).values()
    return {"median": median(found), "worst": max(found)}


@cache
def reference(name: str) -> tuple[Run, Step | None]:
    """Stock with a recipe, and its last step in fp32 on the same weights, where it is compared with several chunks."""
    settings = RECIPES[name].settings
    stock = run(settings)
    if RECIPES[name].plans == _WHOLE:
        return stock, None
    plain = {name: value for name, value in settings.items() if not name.startswith(("fp8", "bf16"))}
    return stock, run(plain, weights=[stock.steps[-1].weights]).steps[0]


def compare(name: str) -> dict[str, Any]:
    """Every plan of a recipe next to stock, see :func:`compared`, and next to fp32."""
    recipe = RECIPES[name]
    without_recompute = {key: value for key, value in recipe.settings.items() if not key.startswith("recompute")}
    same = next((other for other, one in RECIPES.items() if one.settings == without_recompute), None)
    with replaced(gradients_worker, "MICRO_BATCH", recipe.micro_batch):
        stock, truth = reference(same or name)
        # Weights that are kept in fp8 can't be copied. One chunk moves them as stock does.
        weights = None if recipe.settings.get("fp8_param") else [one.weights for one in stock.steps]
        runs = {name: run(recipe.settings, plan, weights) for name, plan in recipe.plans.items()}
    return {
        "plans": {name: compared(ours, stock) for name, ours in runs.items()},
        "errors": {name: errors(one.steps[-1], truth) for name, one in {"stock": stock, **runs}.items() if truth},
    }


def results_of_recipes(*names: str) -> dict[str, Any]:
    """What is found for each of these recipes."""
    with parallel({"expert_model_parallel_size": 2}):
        return {name: compare(name) for name in names}
