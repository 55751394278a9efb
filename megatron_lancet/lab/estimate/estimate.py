"""Estimates the step of each plan at the ends of all ranges: simulated layers, pipeline, gradients, optimizer, memory.

    step = (m + (p - 1) / v) * slot + reductions + optimizer + activations between stages

with m micro-batches, p stages and v virtual stages on each (Narayanan et al. 2021, section 2.2), and the slot of the
slowest stage from the planner's simulator.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_lancet.lab.dry_run.memory import Memory
from megatron_lancet.lab.estimate.candidates import STOCK, Allowed, Candidate, basic, stock, with_dispatches
from megatron_lancet.lab.estimate.devices import Speeds
from megatron_lancet.lab.estimate.model_profile import Run, profile_of
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Prediction, Simulator
from megatron_lancet.planning.sizes.saved_tensors import FP32_BYTES, residual_bytes, value_bytes
from megatron_lancet.planning.stages import split_at_stages
from megatron_lancet.schedule.plan import Plan

_OPTIMIZER_PASSES = 2
"""The optimizer reads and writes its state."""
_UNEVEN_ACTIVATIONS = 1.2
"""A layer keeps up to a fifth more than the dry run counts (docs/dry_run.md)."""


@dataclass(frozen=True)
class Figures:
    """A plan's step at one end of each range.

    Attributes:
        exposed_ms: time for which compute waits for all-to-alls.
        bubble_ms: time for which the step waits for other pipeline stages.
        peak_dw_bytes: memory that deferred weight gradients keep alive.
    """

    step_ms: float
    exposed_ms: float
    bubble_ms: float
    peak_dw_bytes: int

    @property
    def exposed_share(self) -> float:
        """Part of the step for which compute waits for all-to-alls."""
        return self.exposed_ms / self.step_ms


@dataclass(frozen=True)
class Estimate:
    """A candidate with its figures, in the order of the corners of the ranges; none if the run can't have it.

    Attributes:
        memory: (low, high) bytes on a GPU of the fullest stage.
    """

    candidate: Candidate
    figures: tuple[Figures, ...] = ()
    memory: tuple[float, float] = (0.0, 0.0)

    def range_of(self, name: str) -> tuple[float, float]:
        """Lowest and highest value of an attribute of the figures."""
        values = [getattr(one, name) for one in self.figures]
        return min(values), max(values)

    def speedup(self, before: "Estimate") -> tuple[float, float]:
        """Lowest and highest speed-up over another candidate, corner by corner."""
        ratios = [old.step_ms / new.step_ms for old, new in zip(before.figures, self.figures, strict=True)]
        return min(ratios), max(ratios)

    @property
    def mean_step_ms(self) -> float:
        """Mean over the corners, by which candidates are compared."""
        return sum(one.step_ms for one in self.figures) / len(self.figures)


def estimates(run: Run, corners: Sequence[Speeds], allowed: Allowed) -> list[Estimate]:
    """Estimates all candidates: stock first, other dispatches of the fastest plan last."""
    estimator = Estimator(run, corners)
    found = [estimator.estimate(one) for one in (stock(allowed), *basic(allowed))]
    best = fastest(found[1:])
    return [*found, *(estimator.estimate(one) for one in with_dispatches(best.candidate, allowed))]


def fastest(found: Sequence[Estimate]) -> Estimate:
    """The candidate with the shortest mean step."""
    return min((one for one in found if one.figures), key=lambda one: one.mean_step_ms)


class Estimator:
    """Estimates plans of a run; what plans share is computed once for each corner."""

    def __init__(self, run: Run, corners: Sequence[Speeds]) -> None:
        self.run = run
        self._corners = [Corner(run, speeds) for speeds in corners]

    def estimate(self, candidate: Candidate, repeats_messages: bool = False) -> Estimate:
        """Estimates a candidate at each corner.

        Args:
            repeats_messages: whether recompute sends the messages of the forward again, as it does in stock.
        """
        plan = candidate.plan
        if plan is None:
            return Estimate(candidate)
        is_stock = candidate.name == STOCK
        figures = tuple(corner.figures(plan, repeats_messages or is_stock, is_stock) for corner in self._corners)
        stages = self.run.findings.memory_by_way.of(is_stock, plan.is_paired)
        return Estimate(candidate, figures, self._memory(stages, max(one.peak_dw_bytes for one in figures)))

    def _memory(self, stages: Sequence[Memory], dw_bytes: int) -> tuple[float, float]:
        low = max(stage.total for stage in stages) + dw_bytes
        more = max(stage.activations for stage in stages) * (_UNEVEN_ACTIVATIONS - 1)
        share = self._corners[0].profile.received_share
        return low, low + more + self._corners[0].message_bytes * (1 + max(share) * len(share))


class Corner:
    """A run at one end of each range."""

    def __init__(self, run: Run, speeds: Speeds) -> None:
        self._run = run
        self.profile: Profile = profile_of(run, speeds, sum(rest_of_step(run, speeds).values()))

    @cached_property
    def _simulator(self) -> Simulator:
        return Simulator(CostModel(self.profile))

    @property
    def message_bytes(self) -> float:
        """Bytes of a plain message of a micro-batch: the rows of a rank's tokens."""
        return self.profile.model.num_rows * self.profile.model.row_bytes

    def figures(self, plan: Plan, repeats_messages: bool = False, is_stock: bool = False) -> Figures:
        """Figures of a plan's step; see :meth:`Estimator.estimate`."""
        layout = self._run.layout
        profile, simulator = self.profile, self._simulator
        if is_stock and profile.model.wiring:  # stock waits for each message, whichever sum a layer adds
            simulator = Simulator(CostModel(replace(profile, model=replace(profile.model, wiring=""))))
        found: Prediction = simulator.predict(split_at_stages(plan, profile.model.stage_of_layer))
        # A message that recompute sends again is waited for as long as in the forward.
        again_ms = found.exposed_forward_ms * self._run.recomputed_experts if repeats_messages else 0.0
        slot_ms = found.slot_ms + again_ms / layout.num_micro_batches
        simulated_ms, bubble_ms = (bubble_of(layout.pipeline, layout.virtual, ms) for ms in (found.slot_ms, slot_ms))
        step_ms = found.step_ms - simulated_ms + bubble_ms + again_ms
        return Figures(step_ms, found.exposed_ms + again_ms, bubble_ms, found.peak_dw_bytes)


def bubble_of(num_stages: int, num_virtual: int, slot_ms: float) -> float:
    """Time for which a step waits for other stages: (p - 1) / v slots.

    Args:
        slot_ms: time of a micro-batch on the slowest stage, forward and backward.
    """
    return (num_stages - 1) * slot_ms / num_virtual


def rest_of_step(run: Run, speeds: Speeds) -> dict[str, float]:
    """Milliseconds of a step outside forward and backward, by what takes them."""
    return dict(_rest_of_step(run, speeds))


def _rest_of_step(run: Run, speeds: Speeds) -> Iterator[tuple[str, float]]:
    args, layout, size = run.args, run.layout, run.findings.size
    fullest = max(range(len(size.held)), key=lambda stage: size.held[stage].all)
    held, memory = size.held[fullest], run.findings.memory[fullest]
    moved = _OPTIMIZER_PASSES * memory.optimizer + memory.weights + memory.gradients / max(1, layout.dense_shards)
    yield "optimizer", moved / speeds.device.bytes_per_s * 1e3
    expert_stride = layout.expert * layout.expert_tensor
    shares = (held.dense, layout.data * layout.context, layout.tensor), (held.expert, layout.expert_data, expert_stride)
    gradient = FP32_BYTES if args.accumulate_allreduce_grads_in_fp32 else value_bytes(args)
    part = 0.5 if args.use_distributed_optimizer else 1.0  # a scatter is half of an all-reduce
    if not args.overlap_grad_reduce:
        rings = (speeds.cluster.all_reduce_ms(numel * gradient, num, stride) for numel, num, stride in shares)
        yield "gradients", part * sum(rings)
    if args.use_distributed_optimizer and not args.overlap_param_gather:
        rings = (speeds.cluster.all_reduce_ms(numel * value_bytes(args), num, stride) for numel, num, stride in shares)
        yield "weights", sum(rings) / 2
    if layout.pipeline > 1:
        distance = layout.num_ranks // layout.pipeline
        message_ms = speeds.cluster.message_ms(residual_bytes(args), distance)
        yield "activations between stages", 2 * (layout.pipeline - 1) * message_ms
