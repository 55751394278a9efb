"""One small model on the virtual GPU, next to stock on the same weights: gradients, and what the GPU found."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from benchmarks.gradient_error import relative_difference, relative_errors
from megatron_lancet.features.cuda_graphs.feature import KEY, ActiveGraphs
from megatron_lancet.features.pairing.schedules import paired_schedules
from megatron_lancet.features.row_bound import rounds
from megatron_lancet.features.row_bound.limit import Counts, RowLimit
from megatron_lancet.features.shortcut.feature import ActiveShortcut
from megatron_lancet.patching import around, replaced
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.trace import Trace
from megatron_lancet.runtime.transport.base import TokenCounts
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.reductions import MicroOps
from megatron_lancet.testkit.mock.mock_world import mock_world
from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu
from megatron_lancet.testkit.virtual_gpu.log import CollectiveBegins, GraphLaunched, HostWaits, Kernel
from megatron_lancet.testkit.virtual_gpu.megatron import virtual_gpu_platform
from megatron_lancet.testkit.virtual_gpu.memory import Problem
from megatron_lancet.training.overlap_setup import OverlapSetup
from tests.parity.gradients.gradients_worker import NUM_MICRO_BATCHES, build, gradients, logged_losses, micro_batches
from tests.virtual_gpu.paired import scheduled_step
from tests.virtual_gpu.pipeline import first_stage, pipeline_step

NUM_RANKS, EP = 8, 4
STREAMS = ("compute", "comm", "counts", "DDP", "NCCL")
"""Names of streams, or parts of them."""
HOPS = {OpKind.NODE_DISPATCH: "between nodes", OpKind.LOCAL_DISPATCH: "inside a node"}
"""Ends of the names of the streams of two hops, by a kind of message that is on them."""
IN_ORDER: tuple[str, ...] = ()
"""No stream is late."""


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and the plans of its watched steps.

    Attributes:
        plans: plans to run, each for a step per entry of ``late``; one if the run is not switchable.
        overrides: settings of the model's config that differ.
        late: for each watched step the names of streams that run as late as the order permits.
        layout: sizes of Megatron's other parallel groups.
        micro_op_mb: size of gradient micro-ops, if all-to-alls go before reductions.
        is_traced: the watched steps are recorded, as for a profile.
        equals_stock: the mock's collectives give chunks the numbers of the whole; else only steps are compared.
        num_scheduled: micro-batches of a step of Megatron's schedule without pipeline parallelism, which runs pairs;
            None if the test's own loop runs the step.
        nodes: how expert-parallel groups lie on nodes, for plans with two hops.
        max_rows: that a rank's experts work on at a time; None for any number.
        is_wired: whether routed sums are added one layer later.
        is_captured: whether attention and routing of layers in one chunk are replayed from graphs.
    """

    plans: Sequence[Plan]
    overrides: dict[str, Any] = field(default_factory=dict)
    late: Sequence[Sequence[str]] = (IN_ORDER,)
    switchable: bool = False
    overlap_grad_reduce: bool = True
    distributed_optimizer: bool = False
    micro_op_mb: float | None = None
    layout: dict[str, int] = field(default_factory=dict)
    is_traced: bool = False
    equals_stock: bool = True
    num_scheduled: int | None = None
    nodes: Nodes | None = None
    max_rows: int | None = None
    is_wired: bool = False
    is_captured: bool = False

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.num_scheduled or NUM_MICRO_BATCHES

    @property
    def stock(self) -> str:
        """Names all that matters to a run of stock."""
        settings = (self.overrides, self.overlap_grad_reduce, self.distributed_optimizer, self.layout)
        return repr((*settings, self.num_scheduled))


@dataclass(frozen=True)
class Found:
    """What the watched steps of a case have shown.

    Attributes:
        loss: largest relative error of a micro-batch's loss, in any step.
        gradients: largest relative error of each parameter's gradient in any step.
        host_waits: of each step.
        exchanges: names of the streams on which all-to-alls ran.
        order: collectives, in the order in which the host has launched them.
        launches: kernels, and graphs, that the host has launched in each step.
        kernels: of each step, by name.
        logged: largest relative error of a loss beside the model's that Megatron has logged.
        graphs: what :class:`ActiveGraphs` reports of the last plan.
    """

    loss: float
    gradients: dict[str, float]
    problems: Sequence[Problem]
    host_waits: Sequence[Sequence[HostWaits]] = ()
    exchanges: frozenset[str] = frozenset()
    order: Sequence[str] = ()
    launches: Sequence[int] = ()
    kernels: Sequence[Mapping[str, int]] = ()
    logged: float = 0.0
    graphs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def largest_error(self) -> float:
        """Largest relative error of a loss or gradient; infinite if one is not a number."""
        errors = [self.loss, *self.gradients.values()]
        return max(errors) if all(error == error for error in errors) else float("inf")


class _Stock(NamedTuple):
    weights: dict[str, torch.Tensor]
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    logged: dict[str, list[float]]


_STOCK: dict[str, _Stock] = {}


def run(case: Case, change: Callable[[ExitStack], None] | None = None) -> Found:
    """Runs stock without streams, once for all cases that share it, then ours on the virtual GPU.

    Args:
        change: what is changed while ours runs.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatron_lancet.training.megatron.mock_patches import loopback_counts
    from megatron_lancet.training.megatron.patches import dropped_outputs, sequence_parallel_with_torch_norm

    logged_losses()  # of whatever ran in this process before
    overrides = {"num_moe_experts": 8, "expert_model_parallel_size": EP, **case.layout, **case.overrides}
    is_pipeline = case.layout.get("pipeline_model_parallel_size", 1) > 1
    with ExitStack() as world:
        world.enter_context(mock_world(NUM_RANKS))
        for context in (loopback_counts, sequence_parallel_with_torch_norm, dropped_outputs):
            world.enter_context(context())
        # Megatron keeps the scale of the auxiliary loss for the life of the process; its schedule sets another.
        world.enter_context(replaced(MoEAuxLossAutoScaler, "main_loss_backward_scale", None))
        if is_pipeline:
            world.enter_context(first_stage())
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=EP, create_gloo_process_groups=False, **case.layout
        )
        try:
            if case.stock not in _STOCK:
                _STOCK[case.stock] = _stock_step(case, overrides)
            with virtual_gpu_platform() as gpu, ExitStack() as stack:
                if change is not None:
                    change(stack)
                return _our_steps(case, overrides, gpu, stack)
        finally:
            logged_losses()
            parallel_state.destroy_model_parallel()


def _stock_step(case: Case, overrides: dict[str, Any]) -> _Stock:
    model, config, precision = build(overrides)
    if case.is_wired:
        ActiveShortcut().prepare_stock([model])
    weights = copy.deepcopy(model.state_dict())
    losses = _step(case, _wrapped(case, model, config, precision, False))
    return _Stock(weights, losses, gradients(model), logged_losses())


def _wrapped(case: Case, model: Any, config: Any, precision: Any, deferred: bool) -> Any:
    """As Megatron does it, on a stream of its own."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=case.overlap_grad_reduce,
        bucket_size=4000 if case.overlap_grad_reduce else None,
        grad_reduce_in_fp32=True,
        delay_wgrad_compute=deferred,
        use_distributed_optimizer=case.distributed_optimizer,
    )
    stream = torch.cuda.Stream()
    stream.name = "DDP"
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ddp = DistributedDataParallel(config, ddp_config, precision(config, model))
    torch.cuda.current_stream().wait_stream(stream)
    return ddp


def _step(case: Case, ddp: Any) -> list[float]:
    losses = []
    ddp.zero_grad_buffer()
    if ddp.config.pipeline_model_parallel_size > 1:
        return pipeline_step(ddp, lambda tensor: tensor.cuda())
    if case.num_scheduled is not None:
        return scheduled_step(ddp, case.num_scheduled, lambda tensor: tensor.cuda())
    for i, batch in enumerate(micro_batches()):
        with nullcontext() if i == NUM_MICRO_BATCHES - 1 else ddp.no_sync():
            on_gpu = {name: tensor.cuda() for name, tensor in batch.items()}
            loss = ddp(attention_mask=None, **on_gpu).float().mean()
            (loss / NUM_MICRO_BATCHES).backward()
        losses.append(loss.detach())
        del loss
    ddp.finish_grad_sync()
    return [loss.item() for loss in losses]


def _our_steps(case: Case, overrides: dict[str, Any], gpu: VirtualGpu, stack: ExitStack) -> Found:
    stock = _STOCK[case.stock]
    model, config, precision = build(overrides)
    model.load_state_dict(copy.deepcopy(stock.weights))
    model.cuda()
    device = torch.device("cuda")
    stats = CommStats(device)
    priority: list[Any] = []
    wired = [ActiveShortcut()] if case.is_wired else []
    if case.micro_op_mb is not None:
        from megatron_lancet.features.comm_priority.feature import ActivePriority

        priority = [ActivePriority(MicroOps(round(case.micro_op_mb * 1e6)), stats)]
        priority[0].enter(stack)
    from megatron_lancet.features.two_hop.feature import ActiveNodes

    setup = OverlapSetup(
        case.plans[0],
        device,
        stats,
        timedelta(minutes=2),
        switchable=case.switchable,
        features=[*priority, *wired, ActiveNodes(case.nodes, device, stats, timedelta(minutes=2))],
    )
    if case.num_scheduled is not None:
        stack.enter_context(paired_schedules(lambda: setup.stages))
    setup([model])
    if case.max_rows is not None:
        stack.enter_context(rounds_in_loopback())
        from megatron_lancet.features.row_bound.feature import limit_rows

        limit_rows(setup, case.max_rows)
    name_streams(setup._comm.transport)
    for kind, place in (HOPS if case.nodes is not None else {}).items():
        setup._comm.transport_of(Op(1, 0, Phase.FORWARD, kind))._stream.name = f"comm {place}"
    ddp = _wrapped(case, model, config, precision, setup.delays_weight_grads)
    _step(case, ddp)  # DDP only counts; from the second step on reductions start as gradients become ready
    logged_losses()
    return _watched_steps(case, setup, priority, gpu, ddp, model)


def _watched_steps(
    case: Case, setup: OverlapSetup, priority: Sequence[Any], gpu: VirtualGpu, ddp: Any, model: Any
) -> Found:
    stock = _STOCK[case.stock]
    graphs = ActiveGraphs(setup, lambda: case.is_captured, 1)
    found = Found(0.0, dict.fromkeys(stock.gradients, 0.0), gpu.problems, [], frozenset())
    for plan in case.plans:
        if case.switchable:
            setup.switch(plan)
        for _ in range(2 if case.is_captured else 0):  # an eager step, and one behind the capture
            with gpu.watch():
                graphs.observe(lambda: _step(case, ddp))
            _logged(case)
        for names in case.late:
            losses, host_waits, exchanges = _watched_step(case, setup, graphs, gpu, ddp, names)
            for feature in priority:
                feature.observe(lambda: None)
            logged = _logged(case)
            if not case.equals_stock and not found.host_waits:
                stock = stock._replace(losses=losses, gradients=gradients(model), logged=logged)
            errors = relative_errors(gradients(model), stock.gradients)
            found = Found(
                _larger(found.loss, relative_difference(losses, stock.losses)),
                {name: _larger(found.gradients[name], error) for name, error in errors.items()},
                gpu.problems,
                [*found.host_waits, host_waits],
                found.exchanges | exchanges,
                [*found.order, *_order_of(gpu)],
                [*found.launches, _num_launches(gpu)],
                [*found.kernels, Counter(entry.name for entry in gpu.log if isinstance(entry, Kernel))],
                max(found.logged, logged_error(stock.logged, logged)),
                graphs.summary()[KEY],
            )
            setup._stats.take()
    return found


def _logged(case: Case) -> dict[str, list[float]]:
    """The losses that Megatron has logged of a step. A graph adds to the memory that it was captured with."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker, set_moe_metrics_tracker

    tracker = get_moe_metrics_tracker()
    values = logged_losses()
    if case.is_captured:
        tracker.clear()  # as Megatron's training does
        set_moe_metrics_tracker(tracker)
    return values


def logged_error(stock: Mapping[str, list[float]], found: Mapping[str, list[float]]) -> float:
    """The largest relative error of a layer's loss; infinite if one of stock's was not logged."""
    errors = (relative_difference(found[name], values) if name in found else math.inf for name, values in stock.items())
    return max(errors, default=0.0)


@contextmanager
def rounds_in_loopback() -> Iterator[None]:
    """Makes rounds in which a rank sends as many rows to another one as it receives, as the mocked group needs it.

    The counts of other ranks are the mock's, and the rows for each expert are cut, not the line of them. Rows at a cut
    may then go to a neighbouring expert, so results are compared between steps, and not with stock's.
    """

    def split_counts(stock: Any, limit: RowLimit, counts: TokenCounts) -> tuple[TokenCounts, list[list[int]]]:
        found, of_all = stock(limit, counts)
        num_local = len(of_all[0]) // len(of_all)
        by_peer = [of_all[0][first : first + num_local] for first in range(0, len(of_all[0]), num_local)]
        # As ``counts_of_all_ranks`` for rank 0, on the host.
        ranks = range(len(by_peer))
        return found, [[rows for to in ranks for rows in by_peer[(rank + to) % len(by_peer)]] for rank in ranks]

    def cut_rows(_: Any, counts: Counts, num_ranks: int, number: int) -> torch.Tensor:
        by_source = torch.tensor(counts).view(num_ranks, 1, num_ranks, -1).permute(2, 3, 1, 0)
        upto = torch.stack([by_source * index // number for index in range(number + 1)])
        return upto.diff(dim=0)

    with around(RowLimit, "split_counts", split_counts), around(rounds, "cut_rows", cut_rows):
        yield


def _watched_step(
    case: Case, setup: OverlapSetup, graphs: ActiveGraphs, gpu: VirtualGpu, ddp: Any, names: Sequence[str]
) -> tuple[list[float], Sequence[HostWaits], frozenset[str]]:
    late = [stream for stream in gpu.streams if any(name in stream.name for name in names)]
    assert len(late) >= len(names), f"no stream for one of {names}"
    comm = setup._comm
    assert comm is not None
    with gpu.watch(late):
        trace = Trace(torch.device("cuda"), 0) if case.is_traced else None
        comm.record_to(trace)
        losses = graphs.observe(lambda: setup.check_step(lambda: _step(case, ddp)))
        comm.record_to(None)
        if trace is not None:
            trace.end_step()
    begins = (entry for entry in gpu.log if isinstance(entry, CollectiveBegins))
    exchanges = frozenset(gpu.stream_name(one.stream) for one in begins if one.name == "all_to_all")
    return losses, gpu.host_waits, exchanges


def _num_launches(gpu: VirtualGpu) -> int:
    """Kernels and graphs that the host has launched in a step."""
    graphs = [entry for entry in gpu.log if isinstance(entry, GraphLaunched)]
    kernels = sum(isinstance(entry, Kernel) for entry in gpu.log)
    return kernels + len(graphs) - sum(entry.num_kernels for entry in graphs)


def _order_of(gpu: VirtualGpu) -> Iterator[str]:
    """Yields the collectives of a step. Groups have numbers in the order of their use."""
    groups: dict[str, int] = {}
    for entry in gpu.log:
        if isinstance(entry, CollectiveBegins):
            group = groups.setdefault(entry.group, len(groups))
            stream = gpu.stream_name(entry.stream).partition(" of group")[0]
            yield f"{entry.name} of {entry.bytes_to_others:g} bytes on {stream} in group {group}"


def _larger(a: float, b: float) -> float:
    """The larger one, or the one that is not a number."""
    return a if a != a or a > b else b


def name_streams(transport: Any) -> None:
    names = {"_stream": "comm", "_counts_stream": "counts"}
    for attribute, name in names.items():
        stream = getattr(transport, attribute, None)
        if stream is not None:
            stream.name = name
