"""Stock and overlapping model side by side on two ranks: every parameter's gradient, every report to DDP."""

import copy
import re
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from itertools import islice
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.runtime.weight_grad_store import DeferredWeight
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, fixed_plan
from tests.features.case import Case
from tests.layer_inputs import take_inputs
from tests.parity.gradients.disturbances import (
    erratic_wire,
)
from tests.parity.gradients.observer import Observer
from tests.parity.gradients.placed import bring_gradients_home, place
from tests.small_gpt import EXPERTS, SEQ_LENGTH, VOCAB, small_gpt, small_hybrid, transformer_config
from tests.te_cpu.dense import dense_gating_gradients

MICRO_BATCH, NUM_MICRO_BATCHES = 4, 2
NUM_IN_FIRST_STEP = 1
"""Micro-batches of a comparison's first step. The second step adds those of two to each other, before it reduces."""
COUNTERS = ("peak_dw_bytes", "payload_bytes", "peak_expert_rows", "num_chunks", "num_split_chunks", "most_rounds")
"""What is told of a step's communication, see :class:`CommTimes`."""


def build(overrides: dict[str, Any]):
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    from megatron_lancet.training.megatron.patches import fused_core_attention

    overrides = dict(overrides)
    give_inputs = take_inputs(overrides)
    overrides.pop("distributed_optimizer", None)  # of DDP
    position = overrides.pop("position_embedding_type", "learned_absolute")
    tied = overrides.pop("share_embeddings", False)
    pattern = overrides.pop("hybrid_layer_pattern", None)
    frozen = overrides.pop("frozen", None)
    te = overrides.pop("te", False)
    expert_bias = overrides.pop("expert_bias", None)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = transformer_config(**{**EXPERTS, "expert_model_parallel_size": 2, **overrides})
    arguments = {"te": te, "position_embedding_type": position, "share_embeddings_and_output_weights": tied}
    with fused_core_attention(not te and (config.multi_latent_attention or config.context_parallel_size > 1)):
        model = small_gpt(config, **arguments) if pattern is None else small_hybrid(config, pattern, **arguments)
    give_inputs(model)
    if frozen is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(re.search(frozen, name) is None)
    if expert_bias is not None:
        for layer in model.decoder.layers:
            layer.mlp.router.expert_bias.copy_(torch.tensor(expert_bias))
    return model, config, (Float16Module if config.bf16 else lambda _, plain: plain)


def wrap_with_ddp(model, config, precision, deferred: bool, overlaps: bool = True, distributed_optimizer: bool = False):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=overlaps,
        bucket_size=4000 if overlaps else None,
        grad_reduce_in_fp32=True,
        delay_wgrad_compute=deferred,
        use_distributed_optimizer=distributed_optimizer,
    )
    return DistributedDataParallel(config, ddp_config, precision(config, model))


def micro_batches(number: int | None = None):
    """The samples of a step on this rank; of ``NUM_MICRO_BATCHES`` micro-batches unless a number is given."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    generator = torch.Generator().manual_seed(100 + parallel_state.get_data_parallel_rank())
    positions = torch.arange(SEQ_LENGTH).expand(MICRO_BATCH, -1)
    for _ in range(NUM_MICRO_BATCHES if number is None else number):
        tokens = torch.randint(VOCAB, (MICRO_BATCH, SEQ_LENGTH + 1), generator=generator)
        batch = {"input_ids": tokens[:, :-1], "position_ids": positions, "labels": tokens[:, 1:]}
        yield get_batch_on_this_cp_rank(batch, False, parallel_state.get_context_parallel_group())


def step(ddp, num_micro_batches: int | None = None) -> list[float]:
    """One training step without an optimizer: losses of the micro-batches; gradients stay in main_grad.

    Args:
        num_micro_batches: ``NUM_MICRO_BATCHES`` unless it is less; losses are parts of a step of that number anyway.
    """
    losses = []
    torch.manual_seed(5)  # input jitter draws from it
    ddp.zero_grad_buffer()
    ddp.module.set_is_first_microbatch()  # as Megatron's training step does, for fp8
    num_micro_batches = num_micro_batches or NUM_MICRO_BATCHES
    for i, batch in enumerate(islice(micro_batches(), num_micro_batches)):
        last = i == num_micro_batches - 1
        with nullcontext() if last else ddp.no_sync():
            loss = ddp(**{"attention_mask": None, **batch}).float().mean()
            (loss / NUM_MICRO_BATCHES).backward()
        losses.append(loss.item())
    ddp.finish_grad_sync()
    return losses


def logged_losses() -> dict[str, list[float]]:
    """Auxiliary losses as Megatron's log will see them; forgotten, with their names, for the next step."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    values = {name: metric.values.tolist() for name, metric in get_moe_metrics_tracker().metrics.items()}
    destroy_moe_metrics_tracker()
    predictions = MTPLossLoggingHelper.tracker
    values |= {f"mtp {name}": values.tolist() for name, values in predictions.items() if name.endswith("values")}
    predictions.clear()
    return values


def expert_bias_counts(model) -> list[list[float]]:
    return [
        module.local_tokens_per_expert.tolist()
        for module in model.modules()
        if getattr(module, "local_tokens_per_expert", None) is not None
    ]


def plan_of(num_chunks: int, dw="fill", dw_memory_bytes=None, dim="batch", over="stack") -> Plan:
    return fixed_plan(num_chunks, DwPolicy(dw), ChunkDim(dim), OverlapRange(over), dw_memory_bytes)


def overlapping_model(model, plan: Plan, **settings: Any):
    """Makes the model run by the plan; its setup, and counters that know the groups to close."""
    return overlapping_stages([model], plan, **settings)


def overlapping_stages(
    models,
    plan: Plan,
    switchable: bool = False,
    nodes: Nodes | None = None,
    max_rows: int | None = None,
):
    """As :func:`overlapping_model`, for the virtual pipeline stages of a rank."""
    from megatron_lancet.features.row_bound.feature import limit_rows
    from megatron_lancet.features.two_hop.feature import ActiveNodes
    from megatron_lancet.runtime.comm_stats import CommStats
    from megatron_lancet.training.overlap_setup import OverlapSetup

    stats = CommStats(torch.device("cpu"))
    sdpa = models[0].config.context_parallel_size > 1
    before = set(distributed_c10d._world.pg_map)
    timeout = timedelta(minutes=2)
    features = [ActiveNodes(nodes, torch.device("cpu"), stats, timeout)]
    setup = OverlapSetup(plan, torch.device("cpu"), stats, timeout, sdpa, switchable, features=features)
    setup(models)
    limit_rows(setup, max_rows)
    stats.groups = [group for group in distributed_c10d._world.pg_map if group not in before]
    return setup, stats


def close(stats) -> None:
    """Ends a model's connections: with those of a hundred models the threads alone slow each other down."""
    dist.barrier()  # nobody is still sending
    for group in stats.groups:
        dist.destroy_process_group(group)


def trained(model) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def gradients(model) -> dict[str, torch.Tensor]:
    """Main gradients by name; those of experts are where stock has them."""
    bring_gradients_home(model)
    return {name: parameter.main_grad.clone() for name, parameter in trained(model).items()}


def deferred_weights(model) -> list[DeferredWeight]:
    """Weights whose gradients the store computes; a module of Transformer Engine may have several."""
    found = [module.deferred for module in model.modules() if getattr(module, "deferred", None)]
    return [weight for one in found for weight in (one if isinstance(one, list) else [one])]


def largest(steps: list[dict[str, float]]) -> dict[str, float]:
    """Each parameter's largest error in any step; it may be trained in one of them only."""
    return {name: max(errors.get(name, 0.0) for errors in steps) for errors in steps for name in errors}


class StockRun(NamedTuple):
    """Two steps of Megatron's own model: what they started from, losses and gradients, what was logged and counted."""

    weights: dict[str, torch.Tensor]
    steps: list[tuple[list[float], dict[str, torch.Tensor]]]
    logged: dict[str, list[float]]
    expert_bias_counts: list[list[float]]


_STOCK_RUNS: dict[str, StockRun] = {}


def stock_run(overrides) -> StockRun:
    """Of the model with these settings, in this layout, on these data; run once for all plans it is compared with."""
    from megatron.core import parallel_state

    layout = (
        dist.get_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    )
    key = repr((overrides, layout, micro_batches.__qualname__, MICRO_BATCH))
    if key not in _STOCK_RUNS:
        with dense_gating_gradients():
            _STOCK_RUNS[key] = run_stock(overrides)
    return _STOCK_RUNS[key]


def run_stock(overrides) -> StockRun:
    model, config, precision = build(overrides)
    weights = copy.deepcopy(model.state_dict())
    shards = overrides.get("distributed_optimizer", False)
    stock = wrap_with_ddp(model, config, precision, deferred=False, distributed_optimizer=shards)
    steps = [(step(stock, num), gradients(model)) for num in (NUM_IN_FIRST_STEP, NUM_MICRO_BATCHES)]
    return StockRun(weights, steps, logged_losses(), expert_bias_counts(model))


def in_two_layers(overrides: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The overrides with two layers, unless they or the plan distinguish three.

    The model without overrides keeps three: tests compare its messages with the messages of cases that need three.
    """
    are_named = bool(overrides.keys() & {"num_layers", "moe_layer_freq", "frozen"})
    needs_three = are_named or overrides.get("recompute_method") == "block" or len(plan.segments) > 1 or plan.gaps
    return overrides if needs_three or not overrides else {**overrides, "num_layers": 2}


def compare(overrides, num_chunks: int, disturb=None, **plan: Any) -> dict[str, Any]:
    """:func:`compare_plan` with a fixed plan: arguments of :func:`plan_of`."""
    return compare_plan(overrides, plan_of(num_chunks, **plan), disturb)


def compare_case(case: Case, disturb=None, config: dict[str, Any] | None = None, nodes: Nodes | None = None):
    """:func:`compare_plan` of a case.

    Args:
        disturb: what disturbs our run, if the case does not say so.
        config: sizes of the layout.
    """
    return compare_plan(
        {**(config or {}), **case.overrides},
        case.plan,
        erratic_wire if case.disturbed else disturb,
        nodes=nodes,
        moves_weights=case.moves_weights,
        max_rows=case.max_rows,
    )


def compare_plan(
    overrides,
    plan: Plan,
    disturb=None,
    against=None,
    nodes: Nodes | None = None,
    moves_weights: bool | None = None,
    max_rows: int | None = None,
) -> dict[str, Any]:
    """Two steps of stock and of ours on the same weights and data; how far they are apart.

    In DDP's first step reductions start at its end, from the second on as soon as gradients become ready. The first
    has one micro-batch, the second two.

    Args:
        against: stock's settings where they are not ours.
        nodes: how expert-parallel groups lie on nodes, for two hops.
        moves_weights: see :class:`Case`; gradients of experts on other ranks are compared on stock's.
        max_rows: that a rank's experts work on at a time.
    """
    from megatron_lancet.model.local_experts import grouped_linear

    overrides = in_two_layers(overrides, plan)
    stock = stock_run(overrides if against is None else in_two_layers(against, plan))
    our_model, config, precision = build(overrides)
    our_model.load_state_dict(copy.deepcopy(stock.weights))

    setup, stats = overlapping_model(our_model, plan, nodes=nodes, max_rows=max_rows)
    place(our_model, moves_weights)
    shards = overrides.get("distributed_optimizer", False)
    ours = wrap_with_ddp(our_model, config, precision, setup.delays_weight_grads, distributed_optimizer=shards)
    with ExitStack() as stack:
        if disturb is not None:
            disturb(stack)
        name = "multiply_one_by_one"
        grouped = stack.enter_context(mock.patch.object(grouped_linear, name, wraps=getattr(grouped_linear, name)))
        results = [(step(ours, NUM_IN_FIRST_STEP), gradients(our_model))]
        observer = Observer(stack, ours)
        results.append((step(ours), gradients(our_model)))
    times = stats.take()
    close(stats)
    setup.check_step(lambda: None)
    logged = logged_losses()
    pairs = list(zip(results, stock.steps, strict=True))
    return {
        "loss": max(relative_difference(a[0], b[0]) for a, b in pairs),
        "gradients": largest([relative_errors(a[1], b[1]) for a, b in pairs]),
        "zero_gradients": [name for name, gradient in results[1][1].items() if not gradient.any()],
        "logged": max((relative_difference(logged[name], stock.logged[name]) for name in stock.logged), default=0.0),
        "logged_names_equal": logged.keys() == stock.logged.keys(),
        "expert_bias_counts_equal": expert_bias_counts(our_model) == stock.expert_bias_counts,
        "state_keys_equal": list(our_model.state_dict()) == list(stock.weights),
        "collectives": observer.collectives,
        "reports": dict(observer.reports),
        "reports_of_deferred": [weight.num_reported for weight in deferred_weights(our_model)],
        "parameters": list(trained(our_model)),
        "grouped_layers": grouped.call_count,
        "dw_ran_early": times.num_dw_early,
        **{name: getattr(times, name) for name in COUNTERS},
    }
