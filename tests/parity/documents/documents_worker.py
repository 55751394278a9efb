"""Packed documents in the overlapping layers next to stock with a mask of documents, on two ranks."""

import copy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.patching import around, replaced
from tests.parity.documents.cases import CASES, LAYOUTS, LLAMA, PREDICTIONS, ROPE, WHOLE, Case, Samples, sequence
from tests.parity.documents.samples import mask_of, micro_batch, params_of
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.gradients_worker import (
    build,
    close,
    gradients,
    in_two_layers,
    logged_losses,
    plan_of,
    wrap_with_ddp,
)
from tests.small_gpt import EXPERTS, small_gpt, transformer_config

NUM_MICRO_BATCHES = 2
type Disturb = Callable[[], AbstractContextManager[None]]


def without_documents() -> AbstractContextManager[None]:
    """Negative control: attention leaves documents."""
    from megatron_lancet.features.documents.lengths import Documents

    return replaced(Documents, "attend", lambda documents, query, key, value, attend: attend(query, key, value))


def positions_of_chunks() -> AbstractContextManager[None]:
    """Negative control: positions are counted in pieces of four."""
    from megatron_lancet.features.documents.lengths import Documents

    return around(Documents, "positions", lambda stock, self: stock(self) % 4)


def predictions_across_documents() -> AbstractContextManager[None]:
    """Negative control: the last position of a document predicts from the next one."""
    from megatron.core.transformer import multi_token_prediction

    def shift(stock: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    return around(multi_token_prediction, "roll_tensor", shift)


ONE_DOCUMENT = {"plain/k=1": Case({}, plan_of(1)), "llama-like/k=2/sequence": Case(LLAMA, sequence(2))}
"""Samples that are documents."""
DISTURBED: dict[str, tuple[Case, Disturb]] = {
    "without-documents": (Case({}, plan_of(1)), without_documents),
    "positions-of-chunks": (Case(ROPE, sequence(2)), positions_of_chunks),
    "predictions-across-documents": (Case(PREDICTIONS, plan_of(1)), predictions_across_documents),
}


def build_model(case: Case) -> tuple[list[Any], Any, Any]:
    """The stages of the model on this rank, their configuration, and what wraps each for its precision."""
    if case.num_stages == 1:
        model, config, precision = build(case.overrides)
        return [model], config, precision
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    overrides = dict(case.overrides)
    position = overrides.pop("position_embedding_type")
    settings = {**EXPERTS, **overrides, "num_layers": 4, "pipeline_dtype": torch.float32}
    config = transformer_config(**settings, pipeline_model_parallel_size=case.num_stages)
    last = case.num_stages - 1
    stages = [
        small_gpt(config, stage, position_embedding_type=position, pre_process=stage == 0, post_process=stage == last)
        for stage in range(case.num_stages)
    ]
    return stages, config, lambda _, plain: plain


def inputs_of(samples: Samples, seed: int, has_mask: bool, end_to_end: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's part of a micro-batch, and how documents are told.

    Args:
        has_mask: by a mask, not by Megatron's parameters.
        end_to_end: whether samples lie one behind the other.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    batch, documents = micro_batch(samples, seed)
    if has_mask:
        batch["attention_mask"] = mask_of(documents)
    batch = get_batch_on_this_cp_rank(batch, False, parallel_state.get_context_parallel_group())
    if has_mask:
        return batch, {"attention_mask": batch.pop("attention_mask")}
    if end_to_end:
        batch = {name: tensor.reshape(1, -1) for name, tensor in batch.items()}
    return batch, {"attention_mask": None, "packed_seq_params": params_of(samples)}


def forward(stages: list[Any], batch: dict[str, Any], **inputs: Any) -> torch.Tensor:
    """The mean loss of the tokens that count."""
    for stage, following in pairwise(stages):
        hidden = stage(batch["input_ids"], batch["position_ids"], **inputs)
        following.module.set_input_tensor([hidden])
    losses = stages[-1](**batch, **inputs).float() * batch["loss_mask"]
    return losses.sum() / batch["loss_mask"].sum()


def run(stages: list[Any], case: Case, is_ours: bool) -> tuple[list[float], list[float]]:
    """A step without an optimizer, and an evaluation of the same micro-batches: their losses."""
    from megatron.core import parallel_state

    # Stock's local layers take a mask, and Transformer Engine's take samples end to end.
    has_mask = not is_ours and not case.overrides.get("te")
    end_to_end = case.end_to_end if is_ours else not has_mask
    rank = parallel_state.get_data_parallel_rank()
    found: list[list[float]] = [[], []]
    for ddp in stages:
        ddp.zero_grad_buffer()
    for losses, trains in zip(found, (True, False), strict=True):
        for ddp in stages:
            ddp.train(trains)
        for number in range(NUM_MICRO_BATCHES):
            # Ranks and micro-batches have different documents, and cut their sequences at different places.
            others = case.others or [one[::-1] for one in case.samples]
            samples = others if (rank + number) % 2 else case.samples
            batch, inputs = inputs_of(samples, 100 * rank + number, has_mask, end_to_end)
            last = number == NUM_MICRO_BATCHES - 1
            with ExitStack() as stack:
                if has_mask and case.overrides.get("mtp_num_layers"):
                    stack.enter_context(stock_predictions(samples))
                for ddp in stages if trains and not last else ():
                    stack.enter_context(ddp.no_sync())
                stack.enter_context(torch.set_grad_enabled(trains))
                loss = forward(stages, batch, **inputs)
                if trains:
                    (loss / NUM_MICRO_BATCHES).backward()
            losses.append(loss.item())
    for ddp in stages:
        ddp.finish_grad_sync()
    return found[0], found[1]


def all_gradients(models: list[Any]) -> dict[str, torch.Tensor]:
    return {f"{i} {name}": one for i, model in enumerate(models) for name, one in gradients(model).items()}


def stock_predictions(samples: Samples) -> AbstractContextManager[None]:
    """Lets stock, which gets a mask, shift tokens inside documents; by its own function, on samples end to end."""
    from megatron.core.transformer import multi_token_prediction

    def shift(stock: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor is None:
            return None, None
        shifted, total = stock(tensor.reshape(1, -1), *args, **{**kwargs, "packed_seq_params": params_of(samples)})
        return shifted.view(tensor.shape), total

    return around(multi_token_prediction, "roll_tensor", shift)


def overlapping(models: list[Any], case: Case) -> tuple[Any, Any]:
    from torch.distributed import distributed_c10d

    from megatron_lancet.features.documents.feature import ActiveDocuments
    from megatron_lancet.runtime.comm_stats import CommStats
    from megatron_lancet.training.overlap_setup import OverlapSetup

    stats = CommStats(torch.device("cpu"))
    before = set(distributed_c10d._world.pg_map)
    setup = OverlapSetup(case.plan, torch.device("cpu"), stats, timedelta(minutes=2), features=[ActiveDocuments()])
    setup(models)
    stats.groups = [group for group in distributed_c10d._world.pg_map if group not in before]
    return setup, stats


def our_run(case: Case, weights: list[Any]) -> dict[str, Any]:
    models, config, precision = build_model(case)
    for model, own in zip(models, weights, strict=True):
        model.load_state_dict(own)
    setup, stats = overlapping(models, case)
    stages = [wrap_with_ddp(model, config, precision, setup.delays_weight_grads, overlaps=False) for model in models]
    losses, evaluated = run(stages, case, is_ours=True)
    setup.check_step(lambda: None)
    close(stats)
    return {"losses": losses, "evaluated": evaluated, "gradients": all_gradients(models), "logged": logged_losses()}


def stock_run(case: Case) -> tuple[list[Any], dict[str, Any]]:
    """Weights that both begin with, and what stock finds."""
    models, config, precision = build_model(case)
    weights = [copy.deepcopy(model.state_dict()) for model in models]
    stages = [wrap_with_ddp(model, config, precision, deferred=False, overlaps=False) for model in models]
    losses, evaluated = run(stages, case, is_ours=False)
    found = {"losses": losses, "evaluated": evaluated, "gradients": all_gradients(models), "logged": logged_losses()}
    return weights, found


def distance(ours: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    return {
        "loss": relative_difference(ours["losses"], stock["losses"]),
        "evaluation": relative_difference(ours["evaluated"], stock["evaluated"]),
        "gradients": relative_errors(ours["gradients"], stock["gradients"]),
        "zero_gradients": [name for name, gradient in ours["gradients"].items() if not gradient.any()],
        "logged": max((relative_difference(ours["logged"][n], stock["logged"][n]) for n in stock["logged"]), default=0),
        "logged_names_equal": ours["logged"].keys() == stock["logged"].keys(),
    }


def compare(case: Case, disturb: Disturb, stock_runs: dict[str, Any]) -> dict[str, Any]:
    from megatron_lancet.features.mtp.feature import predictions_in_documents

    key = repr((case.overrides, case.samples, case.others, case.num_stages))
    if key not in stock_runs:
        stock_runs[key] = stock_run(case)
    weights, stock = stock_runs[key]
    with predictions_in_documents(), disturb():
        return distance(our_run(case, copy.deepcopy(weights)), stock)


def one_document_a_sample(case: Case) -> dict[str, Any]:
    """Samples that are documents, next to the same samples without a word of documents."""
    case = case._replace(samples=WHOLE)
    weights, _ = stock_run(case)
    ours = our_run(case, copy.deepcopy(weights))
    with replaced(sys.modules[__name__], "params_of", lambda samples: None):
        return distance(ours, our_run(case, copy.deepcopy(weights)))


def in_layout(name: str) -> dict[str, Any]:
    with parallel(LAYOUTS[name]) as settings:
        results, stock_runs = {}, dict[str, Any]()

        def settled(case: Case) -> Case:
            return case._replace(overrides=in_two_layers({**settings, **case.overrides}, case.plan))

        for case_name, case in CASES[name].items():
            results[f"{name}/{case_name}"] = compare(settled(case), nullcontext, stock_runs)
        if name == "EP2":
            for case_name, (case, disturb) in DISTURBED.items():
                results[case_name] = compare(settled(case), disturb, stock_runs)
            for case_name, case in ONE_DOCUMENT.items():
                results[f"one-document/{case_name}"] = one_document_a_sample(settled(case))
        return results


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    from megatron_lancet.training.megatron.patches import sequence_parallel_with_torch_norm

    results: dict[str, Any] = {}
    with sequence_parallel_with_torch_norm():
        for name in LAYOUTS:
            results |= in_layout(name)
    return results
