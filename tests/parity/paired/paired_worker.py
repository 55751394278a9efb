"""Stock and plans with pairing side by side on two ranks, in steps of Megatron's own schedule."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.errors import UsageError
from megatron_lancet.patching import around, replaced
from tests.parity.gradients import gradients_worker
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.disturbances import erratic_wire
from tests.parity.gradients.gradients_worker import (
    build,
    close,
    gradients,
    in_two_layers,
    largest,
    logged_losses,
    overlapping_model,
    trained,
    wrap_with_ddp,
)
from tests.parity.gradients.observer import Observer
from tests.parity.paired.paired_cases import (
    CASES,
    DROPOUT,
    LATE_FORWARDS,
    OTHER_SAMPLES,
    OTHER_SETTINGS,
    RANDOM_IN_BACKWARD,
    SWITCHED,
    SWITCHED_PLANS,
    Case,
)


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """As the training script's: takes the next samples, and returns the output and what makes a loss of it."""
    output = model(**{"attention_mask": None, **next(batches)})

    def loss(output: torch.Tensor) -> tuple[Any, ...]:
        losses = output.float()
        if not model.config.calculate_per_token_loss:
            return losses.mean(), {"loss": losses.mean().detach()}
        return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {"loss": losses.sum().detach()}

    return output, loss


def step(ddp: Any, num_micro_batches: int) -> list[float]:
    """One step of Megatron's schedule without an optimizer: losses; gradients stay in main_grad."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import schedules

    config = ddp.config
    config.no_sync_func, config.finalize_model_grads_func = ddp.no_sync, finalize_model_grads
    torch.manual_seed(5)
    ddp.zero_grad_buffer()
    with replaced(gradients_worker, "NUM_MICRO_BATCHES", num_micro_batches):
        found = schedules.forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=gradients_worker.micro_batches(),
            model=[ddp],
            num_microbatches=num_micro_batches,
            seq_length=gradients_worker.SEQ_LENGTH,
            micro_batch_size=gradients_worker.MICRO_BATCH,
        )
    return [entry["loss"].item() for entry in found]


def buffers(model: Any) -> dict[str, torch.Tensor]:
    """What a model keeps between steps next to its parameters, such as the bias of its experts."""
    return {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}


class StockRun(NamedTuple):
    """Two steps of Megatron's own model: what they started from, and what they left behind."""

    weights: dict[str, torch.Tensor]
    steps: list[tuple[list[float], dict[str, torch.Tensor]]]
    logged: dict[str, list[float]]
    buffers: dict[str, torch.Tensor]


_STOCK_RUNS: dict[str, StockRun] = {}


def stock_run(case: Case) -> StockRun:
    """Run once for all plans that are compared with it."""
    overrides = case.overrides
    key = repr((overrides, case.num_micro_batches))
    if key not in _STOCK_RUNS:
        model, config, precision = build(overrides)
        weights = copy.deepcopy(model.state_dict())
        shards = overrides.get("distributed_optimizer", False)
        stock = wrap_with_ddp(model, config, precision, deferred=False, distributed_optimizer=shards)
        steps = [(step(stock, num), gradients(model)) for num in case.lengths]
        _STOCK_RUNS[key] = StockRun(weights, steps, logged_losses(), buffers(model))
    return _STOCK_RUNS[key]


def compare(case: Case, disturb: Callable[[ExitStack, Any], None] | None = None) -> dict[str, Any]:
    """Two steps of stock and of ours on the same weights and data; how far they are apart.

    Args:
        disturb: a negative control; is given the communication of our model.
    """
    from megatron_lancet.features.pairing.schedules import paired_schedules

    case = case._replace(overrides=in_two_layers(case.overrides, case.plan))
    overrides, plan, _, disturbed, nodes, max_rows = case
    stock = stock_run(case)
    our_model, config, precision = build(overrides)
    our_model.load_state_dict(copy.deepcopy(stock.weights))
    setup, stats = overlapping_model(our_model, plan, nodes=nodes, max_rows=max_rows)
    shards = overrides.get("distributed_optimizer", False)
    ours = wrap_with_ddp(our_model, config, precision, setup.delays_weight_grads, distributed_optimizer=shards)
    with ExitStack() as stack:
        stack.enter_context(paired_schedules(lambda: setup.stages))
        if disturbed:
            erratic_wire(stack)
        if disturb is not None:
            disturb(stack, our_model.decoder.comm)
        first, second = case.lengths
        results = [(step(ours, first), gradients(our_model))]
        observer = Observer(stack, ours)
        results.append((step(ours, second), gradients(our_model)))
    setup.check_step(lambda: None)
    num_split_chunks = stats.take().num_split_chunks
    close(stats)
    logged, our_buffers = logged_losses(), buffers(our_model)
    pairs = list(zip(results, stock.steps, strict=True))
    return {
        "losses_equal": all(ours[0] == stocks[0] for ours, stocks in pairs),
        "loss": max(relative_difference(ours[0], stocks[0]) for ours, stocks in pairs),
        "num_losses": [len(losses) for losses, _ in results],
        "gradients": largest([relative_errors(ours[1], stocks[1]) for ours, stocks in pairs]),
        "logged": max((relative_difference(logged[name], stock.logged[name]) for name in stock.logged), default=0.0),
        "logged_names_equal": logged.keys() == stock.logged.keys(),
        "buffers_equal": all(buffer.equal(stock.buffers[name]) for name, buffer in our_buffers.items()),
        "num_split_chunks": num_split_chunks,
        "collectives": observer.collectives,
        "reports": dict(observer.reports),
        "parameters": list(trained(our_model)),
    }


def switching() -> list[dict[str, Any]]:
    """A model that changes between plans with and without pairing; see ``switching.py``."""
    from megatron_lancet.features.pairing.schedules import paired_schedules
    from tests.parity.gradients.switching import switch_through_plans

    stages: list[Any] = []

    def run_step(ddp: Any) -> list[float]:
        stages[:] = [ddp.module]
        return step(ddp, 3)

    with paired_schedules(lambda: stages):
        return switch_through_plans({"num_moe_experts": 8}, True, SWITCHED_PLANS, run_step)


def random_numbers_in_backward(stack: ExitStack, comm: Any) -> None:
    """Negative control: a backward draws random numbers between two turns of the forward paired with it."""

    def draw(stock: Callable[[], None]) -> None:
        torch.rand(1)
        stock()

    stack.enter_context(around(comm.progress, "backward_waits", draw))


def samples_of_another(stack: ExitStack, comm: Any) -> None:
    """Negative control: the forwards of a step are added in another order than the samples come in."""
    plain = gradients_worker.micro_batches

    def swapped() -> Iterator[dict[str, torch.Tensor]]:
        first, second, *others = plain()
        yield from (second, first, *others)

    stack.enter_context(replaced(gradients_worker, "micro_batches", swapped))


def late_forwards(stack: ExitStack, comm: Any) -> None:
    """Negative control: on one rank a forward's turns run as late as they can, in front of the last wait."""
    from megatron_lancet.schedule.pairing import PairedTurns

    def done_by(stock: Callable[..., int], turns: PairedTurns, place: int) -> int:
        return stock(turns, place if place == turns.num_backward_waits else 0)

    if dist.get_rank() == 1:
        stack.enter_context(around(PairedTurns, "done_by", done_by))


def what_other_settings_raise() -> str:
    """Negative control: forwards run by the settings of a micro-batch at an end, wherever they are."""
    from megatron_lancet.features.pairing.pairing import Pairing

    def at_end(stack: ExitStack, comm: Any) -> None:
        def add(stock: Callable[..., Any], pairing: Pairing, run: Any, number: int, _: bool, num_waits: int) -> Any:
            return stock(pairing, run, number, True, num_waits)

        stack.enter_context(around(Pairing, "add", add))

    try:
        compare(CASES["chunks-at-ends"], at_end)
    except UsageError as error:
        return str(error)
    finally:
        logged_losses()
    return ""


def without_expert_parallelism() -> dict[str, Any]:
    """Where no message leaves a rank, so that ranks with different turns can't wait for each other."""
    with parallel({"expert_model_parallel_size": 1}) as config:
        return compare(Case(config), late_forwards)


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    with parallel({"expert_model_parallel_size": 2}):
        results: dict[str, Any] = {name: compare(case) for name, case in CASES.items()}
        results[SWITCHED] = switching()
        results[RANDOM_IN_BACKWARD] = compare(Case(DROPOUT), random_numbers_in_backward)
        results[OTHER_SAMPLES] = compare(Case({}), samples_of_another)
        results[OTHER_SETTINGS] = what_other_settings_raise()
    results[LATE_FORWARDS] = without_expert_parallelism()
    return results
