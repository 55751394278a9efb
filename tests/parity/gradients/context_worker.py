"""Context parallelism on two ranks beside stock on whole sequences, and the overlap beside stock's modules.

Usage: context_worker.py RESULT.json. Each rank writes RESULT.json.<rank>.

Stock has no core attention for context parallelism without Transformer Engine. So stock without it is the oracle, on
the same samples; there both ranks are data-parallel, and have the same ones.
"""

import copy
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.patching import replaced
from tests.parity.gradients import gradients_worker
from tests.parity.gradients.disturbances import erratic_wire
from tests.parity.gradients.gradients_worker import (
    NUM_MICRO_BATCHES,
    SEQ_LENGTH,
    build,
    compare,
    gradients,
    logged_losses,
    step,
    wrap_with_ddp,
)
from tests.parity.gradients.variants import MLA, RECOMPUTE, VARIANTS
from tests.ranks.worker import finish, run_on_cpu

CONTEXT = {"context_parallel_size": 2}
LAYOUT = {"expert_model_parallel_size": 2}
DOCUMENTS = "documents"
"""A variant in which positions see only those of their own document."""

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama-like": VARIANTS["llama-like"],
    "mla-yarn": {**MLA, "rope_type": "yarn"},
    "two-aux-losses": VARIANTS["two-aux-losses"],
    DOCUMENTS: {},
}
"""Compared with stock on whole sequences."""

OVERLAPS: dict[str, tuple[dict[str, Any], int, Any, dict[str, str]]] = {
    "plain/k=1": ({}, 1, None, {}),
    "plain/k=2": ({}, 2, None, {}),
    "erratic-wire/k=2": ({}, 2, erratic_wire, {}),
    "bf16/k=1": ({"bf16": True}, 1, None, {}),
    "llama-like/core-attention-recompute/k=2": (
        {**VARIANTS["llama-like"], **VARIANTS["core-attention-recompute"]},
        2,
        None,
        {},
    ),
    "mla-yarn/k=2": (MODELS["mla-yarn"], 2, None, {}),
    "two-aux-losses/expert-bias/k=3": (
        {**VARIANTS["two-aux-losses"], **VARIANTS["sigmoid-expert-bias"]},
        3,
        None,
        {},
    ),
    "global-aux-loss/k=2": (VARIANTS["global-aux-loss"], 2, None, {}),
    f"{DOCUMENTS}/k=2": ({}, 2, None, {}),
    "full-recompute/k=2": (RECOMPUTE["full-recompute"], 2, None, {}),
    "plain/k=3/gate/sequence": ({}, 3, None, {"over": "gate", "dim": "sequence"}),
}
"""Compared with stock's modules under context parallelism: overrides, chunks, what disturbs the run, the plan."""


def document_mask() -> torch.Tensor:
    """[1, 1, S, S], True where attention is not allowed: two documents, whose border no slice has."""
    documents = torch.arange(SEQ_LENGTH) >= 5
    causal = torch.ones(SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).tril()
    return ~(causal & (documents[:, None] == documents))[None, None]


def in_documents(stack: ExitStack) -> None:
    """Gives each micro-batch this rank's rows of the mask."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    plain = gradients_worker.micro_batches
    mask = get_batch_on_this_cp_rank(
        {"attention_mask": document_mask()}, False, parallel_state.get_context_parallel_group()
    )

    def micro_batches():
        for batch in plain():
            yield {**batch, "attention_mask": mask["attention_mask"].expand(len(batch["labels"]), -1, -1, -1)}

    stack.enter_context(replaced(gradients_worker, "micro_batches", micro_batches))


def contiguous_slices(stack: ExitStack) -> None:
    """Negative control: positions are taken for those of a plain cut."""
    from megatron_lancet.model.attention import sdpa

    stack.enter_context(replaced(sdpa, "own_slices", lambda group: (2 * group.rank(), 2 * group.rank() + 1)))


def stock_step(name: str, overrides: dict[str, Any], weights: dict[str, Any] | None, disturb=None) -> dict[str, Any]:
    """Losses of the micro-batches, gradients and weights of stock's modules."""
    model, config, precision = build(overrides)
    if weights is not None:
        model.load_state_dict(weights)
    weights = copy.deepcopy(model.state_dict())
    ddp = wrap_with_ddp(model, config, precision, deferred=False)
    with ExitStack() as stack:
        if name == DOCUMENTS:
            in_documents(stack)
        if disturb is not None:
            disturb(stack)
        losses = torch.tensor(step(ddp))
    dist.all_reduce(losses)
    logged_losses()
    return {"losses": (losses / dist.get_world_size()).tolist(), "gradients": gradients(model), "weights": weights}


def distance(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    return {
        "loss": relative_difference(found["losses"], expected["losses"]),
        "gradients": relative_errors(found["gradients"], expected["gradients"]),
    }


def on_whole_sequences() -> dict[str, dict[str, Any]]:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    parallel_state.initialize_model_parallel(**LAYOUT, create_gloo_process_groups=False)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / NUM_MICRO_BATCHES)
    with replaced(parallel_state, "get_data_parallel_rank", lambda: 0):  # of the samples
        expected = {name: stock_step(name, overrides, None) for name, overrides in MODELS.items()}
    parallel_state.destroy_model_parallel()
    return expected


def on_slices(expected: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    parallel_state.initialize_model_parallel(**LAYOUT, **CONTEXT, create_gloo_process_groups=False)
    # As Megatron's schedule does.
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) * CONTEXT["context_parallel_size"] / NUM_MICRO_BATCHES)
    results: dict[str, Any] = {}
    for name, overrides in MODELS.items():
        found = stock_step(name, {**overrides, **CONTEXT}, expected[name]["weights"])
        results[f"{name}/stock"] = distance(found, expected[name])
    control = stock_step("plain", CONTEXT, expected["plain"]["weights"], contiguous_slices)
    results["contiguous-slices"] = distance(control, expected["plain"])
    for name, (overrides, num_chunks, disturb, cut) in OVERLAPS.items():
        with ExitStack() as stack:
            if name.startswith(DOCUMENTS):
                in_documents(stack)
            results[name] = compare({**overrides, **CONTEXT}, num_chunks, disturb, **cut)
    parallel_state.destroy_model_parallel()
    return results


def main() -> None:
    dist.init_process_group("gloo")
    results = on_slices(on_whole_sequences())
    finish(results)


if __name__ == "__main__":
    run_on_cpu(main)
