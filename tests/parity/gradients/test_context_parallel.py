"""Context parallelism without Transformer Engine: against stock on whole sequences, and with the overlap on top."""

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.patching import replaced
from tests.gradient_deviations import TOLERANCE
from tests.parity.gradients import gradients_worker
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.disturbances import erratic_wire
from tests.parity.gradients.gradients_worker import (
    SEQ_LENGTH,
    build,
    compare,
    gradients,
    logged_losses,
    step,
    wrap_with_ddp,
)
from tests.parity.gradients.variants import MLA, RECOMPUTE, VARIANTS
from tests.ranks import launch

pytestmark = pytest.mark.distributed

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

    with parallel(LAYOUT), replaced(parallel_state, "get_data_parallel_rank", lambda: 0):  # of the samples
        return {name: stock_step(name, overrides, None) for name, overrides in MODELS.items()}


def on_slices(expected: dict[str, dict[str, Any]]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with parallel({**LAYOUT, **CONTEXT}):
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
    return results


def all_results() -> dict[str, Any]:
    """How far each case is from what it is compared with."""
    return on_slices(on_whole_sequences())


results = launch.results(all_results, 2, timeout_s=150)
"""Per rank: what is found for each case."""


@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_slices_equal_those_of_whole_sequences(results, model, check_gradients):
    for rank, result in enumerate(results):
        found = result[f"{model}/stock"]
        check_gradients(found["gradients"], TOLERANCE, f"rank {rank}")
        assert found["loss"] <= TOLERANCE


def test_gradient_comparison_detects_wrong_positions(results):
    for result in results:
        assert max(result["contiguous-slices"]["gradients"].values()) > 1e4 * TOLERANCE


@pytest.mark.parametrize("case", OVERLAPS)
def test_gradients_with_overlap_equal_those_without(results, case, check_gradients):
    bound = 0.0 if case.endswith("/k=1") else TOLERANCE
    check_gradients.equal_stock(results, case, bound)
    for result in results:
        assert result[case]["zero_gradients"] == []
        assert result[case]["expert_bias_counts_equal"]


@pytest.mark.parametrize("case", OVERLAPS)
def test_order_of_collectives_is_the_same_on_all_ranks(results, case):
    first, second = (result[case]["collectives"] for result in results)
    assert first == second
    assert {"_gather_along_first_dim", "_reduce_scatter_along_first_dim"} <= set(first)


def test_order_of_collectives_does_not_depend_on_the_wire(results):
    assert results[0]["erratic-wire/k=2"]["collectives"] == results[0]["plain/k=2"]["collectives"]


def test_keys_are_gathered_during_another_chunks_all_to_all(results):
    order = results[0]["plain/k=2"]["collectives"]
    leaves = order.index("L1.c0.F.dispatch")
    assert "_gather_along_first_dim" in order[leaves : order.index("L1.c0.F.combine")]
