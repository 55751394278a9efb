"""Stock and plans with pairing side by side on four ranks: layouts without pipelines, and interleaved pipelines."""

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.patching import replaced
from tests.parity.gradients import gradients_worker
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.disturbances import erratic_wire
from tests.parity.gradients.gradients_worker import (
    close,
    gradients,
    largest,
    logged_losses,
    overlapping_stages,
    trained,
    wrap_with_ddp,
)
from tests.parity.gradients.observer import Observer
from tests.parity.paired.paired_cases import IN_LAYOUTS, IN_PIPELINES, LAYOUTS, PIPELINES, Case
from tests.parity.paired.paired_worker import buffers, compare, forward_step
from tests.small_gpt import EXPERTS, SEQ_LENGTH, VOCAB, transformer_config

type Cases = Mapping[str, tuple[str, Case]]


def build_stages(overrides: dict[str, Any]) -> tuple[list[Any], Any, Any]:
    """The virtual stages of this rank, their configuration, and what wraps each for its precision."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(1 + parallel_state.get_pipeline_model_parallel_rank())
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    dtype = torch.bfloat16 if overrides.get("bf16") else torch.float32
    config = transformer_config(**{**EXPERTS, "pipeline_dtype": dtype, **overrides})
    num_stages = config.virtual_pipeline_model_parallel_size
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    stages = []
    for vp_stage in range(num_stages):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
        predictions = None
        if config.mtp_num_layers:
            predictions = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
        stages.append(
            GPTModel(
                config,
                spec,
                VOCAB,
                SEQ_LENGTH,
                pre_process=is_first and vp_stage == 0,
                post_process=is_last and vp_stage == num_stages - 1,
                share_embeddings_and_output_weights=False,
                position_embedding_type="rope",
                mtp_block_spec=predictions,
                vp_stage=vp_stage,
            )
        )
    return stages, config, (Float16Module if config.bf16 else lambda _, plain: plain)


def pipelined_step(stages: list[Any], num_micro_batches: int) -> list[float]:
    """One step of Megatron's interleaved schedule without an optimizer: losses, on the ranks of the last stage."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import schedules

    config = stages[0].config
    config.no_sync_func, config.finalize_model_grads_func = [ddp.no_sync for ddp in stages], finalize_model_grads
    torch.manual_seed(5)
    for ddp in stages:
        ddp.zero_grad_buffer()
    with replaced(gradients_worker, "NUM_MICRO_BATCHES", num_micro_batches):
        found = schedules.forward_backward_pipelining_with_interleaving(
            forward_step_func=forward_step,
            data_iterator=[gradients_worker.micro_batches() for _ in stages],
            model=stages,
            num_microbatches=num_micro_batches,
            seq_length=SEQ_LENGTH,
            micro_batch_size=gradients_worker.MICRO_BATCH,
        )
    return [entry["loss"].item() for entry in found]


def run_interleaved(case: Case, weights: list[Any] | None) -> dict[str, Any]:
    """Two steps under the case's plan from these weights; of stock where there are none.

    Returns:
        What is compared, and the weights at the begin, by stage.
    """
    from megatron_lancet.features.pairing.schedules import paired_schedules

    models, config, precision = build_stages(case.overrides)
    first_weights = [copy.deepcopy(model.state_dict()) for model in models]
    with ExitStack() as stack:
        setup = None
        if weights is not None:
            for model, its_weights in zip(models, weights, strict=True):
                model.load_state_dict(copy.deepcopy(its_weights))
            setup, stats = overlapping_stages(models, case.plan, max_rows=case.max_rows)
            stack.enter_context(paired_schedules(lambda: setup.stages))
            if case.disturbed:
                erratic_wire(stack)
        defers = setup is not None and setup.delays_weight_grads
        stages = [wrap_with_ddp(model, config, precision, defers) for model in models]
        steps = [(pipelined_step(stages, case.num_micro_batches), gradients_of(models))]
        observer = Observer(stack, *stages)
        steps.append((pipelined_step(stages, case.num_micro_batches), gradients_of(models)))
    num_split_chunks = 0
    if setup is not None:
        setup.check_step(lambda: None)
        num_split_chunks = stats.take().num_split_chunks
        close(stats)
    return {
        "weights": first_weights,
        "steps": steps,
        "logged": logged_losses(),
        "buffers": {f"{i} {name}": b for i, model in enumerate(models) for name, b in buffers(model).items()},
        "num_split_chunks": num_split_chunks,
        "collectives": observer.collectives,
        "reports": dict(observer.reports),
        "parameters": [f"{i} {name}" for i, model in enumerate(models) for name in trained(model)],
    }


def gradients_of(models: list[Any]) -> dict[str, torch.Tensor]:
    return {f"{i} {name}": gradient for i, model in enumerate(models) for name, gradient in gradients(model).items()}


def compare_interleaved(case: Case) -> dict[str, Any]:
    """As :func:`paired_worker.compare`."""
    stock = run_interleaved(case, None)
    ours = run_interleaved(case, stock["weights"])
    pairs = list(zip(ours["steps"], stock["steps"], strict=True))
    return {
        "losses_equal": all(our_losses == losses for (our_losses, _), (losses, _) in pairs),
        "loss": max(relative_difference(a, b) if b else 0.0 for (a, _), (b, _) in pairs),
        "num_losses": [len(losses) for losses, _ in ours["steps"]],
        "gradients": largest([relative_errors(a, b) for (_, a), (_, b) in pairs]),
        "logged": max(
            (relative_difference(ours["logged"][name], stock["logged"][name]) for name in stock["logged"]), default=0.0
        ),
        "logged_names_equal": ours["logged"].keys() == stock["logged"].keys(),
        "buffers_equal": all(buffer.equal(stock["buffers"][name]) for name, buffer in ours["buffers"].items()),
        "num_split_chunks": ours["num_split_chunks"],
        "collectives": ours["collectives"],
        "reports": ours["reports"],
        "parameters": ours["parameters"],
    }


def in_layout(name: str, settings: dict[str, Any], cases: Cases, compares: Callable[[Case], Any]) -> dict[str, Any]:
    """The comparisons of the cases that have this layout.

    Args:
        settings: of the layout.
    """
    sizes = {field: size for field, size in settings.items() if field.endswith("_parallel_size")}
    own = {case_name: case for case_name, (layout, case) in cases.items() if layout == name}
    (nodes,) = {case.nodes for case in own.values()}
    with parallel(sizes, nodes):
        return {
            case_name: compares(case._replace(overrides={**settings, **case.overrides}))
            for case_name, case in own.items()
        }


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    from megatron_lancet.training.megatron.patches import sequence_parallel_with_torch_norm

    results: dict[str, Any] = {}
    for name, settings in PIPELINES.items():
        results |= in_layout(name, settings, IN_PIPELINES, compare_interleaved)
    with sequence_parallel_with_torch_norm():
        for name, settings in LAYOUTS.items():
            results |= in_layout(name, settings, IN_LAYOUTS, compare)
    return results
