"""All comparisons with stock Megatron that share one start of two ranks."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.gradient_error import relative_error
from megatron_lancet.patching import replaced
from megatron_lancet.schedule.plan import fixed_plan
from tests.features.case import Case
from tests.features.dedup import cases as dedup
from tests.features.placement import cases as placement
from tests.features.row_bound import cases as row_bound
from tests.features.tiles import cases as tiles
from tests.parity.gradients import gradients_worker
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.disturbances import (
    DAMAGED_DEDUP,
    DAMAGED_GRADIENTS,
    detached_experts,
    erratic_wire,
    lost_flush,
    lost_weight_grad,
    naive_aux_loss,
    padding_is_counted,
    same_prediction_twice,
    uses_added_one_by_one,
)
from tests.parity.gradients.gradients_worker import (
    build,
    close,
    compare,
    compare_case,
    compare_plan,
    gradients,
    logged_losses,
    micro_batches,
    overlapping_model,
    plan_of,
    step,
    wrap_with_ddp,
)
from tests.parity.gradients.variants import (
    CUTS,
    DW_MEMORY_CASES,
    FORCED,
    FURTHER,
    HYBRID,
    MICRO_BATCH_OF_ONE,
    SEGMENTED,
    VARIANTS,
    WITH_GAPS,
    chunk_counts,
    cut_name,
)


def kept_bytes(case: Case) -> dict[str, int]:
    """Bytes that autograd keeps between forward and backward on this rank, with and without the limit of rows."""
    found = {}
    for name, max_rows in (("limited", case.max_rows), ("unlimited", None)):
        model, config, precision = build(case.overrides)
        setup, stats = overlapping_model(model, case.plan, max_rows=max_rows)
        ddp = wrap_with_ddp(model, config, precision, setup.delays_weight_grads)
        saved: dict[int, tuple[StorageWeakRef, int]] = {}

        def note(tensor: torch.Tensor, saved: dict[int, tuple[StorageWeakRef, int]] = saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor), ddp.no_sync():
            loss = ddp(**{"attention_mask": None, **next(micro_batches())}).float().mean()
            found[name] = sum(num_bytes for kept, num_bytes in saved.values() if not kept.expired())
            loss.backward()
        close(stats)
    logged_losses()
    return found


def what_a_lost_flush_raises() -> str:
    """The forward of the first step's second micro-batch finds it; DDP itself, at the end of a step, says less."""
    try:
        with replaced(gradients_worker, "NUM_IN_FIRST_STEP", 2):
            compare({}, 2, lost_flush)
    except AssertionError as error:
        return str(error)
    return ""


def bf16_errors(num_chunks: int) -> dict[str, list[float]]:
    """Per parameter: error of stock's bf16 gradient and of ours against fp32 on the same (rounded) weights."""
    stock_model, config, precision = build({"bf16": True})
    our_model, _, _ = build({"bf16": True})
    true_model, true_config, plain = build({})
    for model in (our_model, true_model):
        model.load_state_dict(copy.deepcopy(stock_model.state_dict()))
    overlapping_model(our_model, plan_of(num_chunks))
    for model, its_config, its_precision, deferred in (
        (stock_model, config, precision, False),
        (our_model, config, precision, True),
        (true_model, true_config, plain, False),
    ):
        step(wrap_with_ddp(model, its_config, its_precision, deferred))
    logged_losses()
    truth = gradients(true_model)
    return {
        name: [relative_error(gradients(model)[name], truth[name]) for model in (stock_model, our_model)]
        for name in truth
    }


def rows() -> dict[str, Callable[[], dict[str, Any]]]:
    """Comparisons of a model under a fixed plan, by name."""
    chunked = [(f"{name}/k={k}", model, k) for name, model in VARIANTS.items() for k in chunk_counts(name)]
    chunked += [(f"{name}/k={k}", model, k) for name, model in FORCED.items() for k in (1, 3)]
    found = {name: partial(compare, model, num_chunks) for name, model, num_chunks in chunked}
    return found | {cut_name(name, k, cut): partial(compare, model, k, **cut) for name, model, k, cut in CUTS}


@parallel({"expert_model_parallel_size": 2})
def further_results() -> dict[str, Any]:
    """What is found for the rows that only run at night."""
    return {name: run() for name, run in rows().items() if name in FURTHER}


@parallel({"expert_model_parallel_size": 2})
def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    from tests.parity.gradients.switching import switching_cases

    results: dict[str, Any] = {name: run() for name, run in rows().items() if name not in FURTHER}
    results["bf16/k=1"] = compare({"bf16": True}, 1)
    results["bf16-errors"] = bf16_errors(2)
    with replaced(gradients_worker, "MICRO_BATCH", 1):
        for name, (num_chunks, cut) in MICRO_BATCH_OF_ONE.items():
            results[name] = compare({}, num_chunks, **cut)
    results["dw-none/k=2"] = compare({}, 2, dw="none")
    results["erratic-wire/k=2"] = compare({}, 2, erratic_wire)
    results |= {name: compare_plan(*case) for name, case in SEGMENTED.items()}
    results |= {name: compare_plan({}, plan, erratic_wire) for name, plan in WITH_GAPS.items()}
    for feature in (dedup, tiles, row_bound, placement):
        for name, case in feature.CASES.items():
            results[name] = compare_case(case)
    results["kept"] = kept_bytes(row_bound.CASES[row_bound.HOT])
    results["placed/unmoved"] = compare_case(placement.UNMOVED)
    for plan, damages in ((dedup.ONE, DAMAGED_DEDUP), (tiles.TWO, tiles.DAMAGED)):
        for name, disturb in damages.items():
            results[name] = compare_plan({}, plan, disturb)
    results["tiles/rows-by-part"] = compare_plan({}, tiles.TWO, tiles.rows_by_part)
    for name, disturb in row_bound.DAMAGED.items():
        results[name] = compare_plan({}, fixed_plan(1), disturb, max_rows=40)
    results |= switching_cases()
    for name, (memory_bytes, num_chunks) in DW_MEMORY_CASES.items():
        results[name] = compare({}, num_chunks, erratic_wire, dw_memory_bytes=memory_bytes)
    results["naive-aux-loss/k=2"] = compare({}, 2, naive_aux_loss)
    results["padding-counted/k=2"] = compare({"padded": True}, 2, padding_is_counted)
    results["uses-added-one-by-one/k=1"] = compare(VARIANTS["mtp-repeated"], 1, uses_added_one_by_one)
    results["same-prediction-twice/k=2"] = compare(VARIANTS["mtp-2"], 2, same_prediction_twice)
    results["lost-weight-grad/k=2"] = compare({}, 2, lost_weight_grad)
    results["detached-experts/k=2"] = compare(HYBRID, 2, detached_experts)
    for name, disturb in DAMAGED_GRADIENTS.items():
        results[f"{name}/k=2"] = compare({}, 2, disturb)
    results["lost-flush"] = what_a_lost_flush_raises()
    return results
