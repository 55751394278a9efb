"""``--lancet-rebalance-interval N``: experts change their ranks between two steps where that pays.

All ranks call everything here at the same steps, and decide by the load and the times that all have gathered.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lancet.atomic import atomic_write
from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.features.placement.experts import parameters_of_slots
from megatron_lancet.features.placement.flags import PlacementFlags
from megatron_lancet.features.placement.layers import OptimizerTensors, layers_with_experts, place_experts, slots_of
from megatron_lancet.features.placement.optimizer_state import tensors_beside
from megatron_lancet.features.placement.placement import check_can_place, present_placement
from megatron_lancet.planning.load.expert_load import ExpertLoad
from megatron_lancet.planning.load.placement import placement_to_json, swapped
from megatron_lancet.planning.load.rebalance import Costs, Rebalance, decide
from megatron_lancet.profiler.expert_load import ExpertRows, gathered_load
from megatron_lancet.runtime.collectives import from_all_ranks
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.observe.step_stats import StepTimes, over_ranks, stats_of_rank, step_noise_ms
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.platform.launcher import is_mocked
from megatron_lancet.training.process.console import say

FLAG = "--lancet-rebalance-interval"
PLACEMENT_FILE = "expert_placement.json"
_OPTIMIZERS = ("adam", "sgd")


def check_can_rebalance(args: argparse.Namespace, config: LancetConfig, plan: Plan | None) -> None:
    """
    Args:
        args: Megatron's arguments, validated.
        plan: None for stock modules.

    Raises:
        UsageError: the run can't move experts while it trains.
    """
    interval = config.of(PlacementFlags).rebalance_interval
    if interval is None:
        return
    flag = f"{FLAG} {interval}"
    check_can_place(args, flag, plan)
    model_ranks = args.pipeline_model_parallel_size * (args.expert_tensor_parallel_size or 1)
    num_replicas = args.world_size // (model_ranks * args.expert_model_parallel_size)
    if args.use_distributed_optimizer and num_replicas > 1:
        raise UsageError(
            f"{flag} moves an expert's optimizer state from one rank to another, but --use-distributed-optimizer "
            f"spreads it over {num_replicas} ranks. Drop one of the two, or change slots at a restart with "
            "--lancet-expert-placement."
        )
    ending = next((text for feature in config.features if (text := feature.ends_run(config))), "")
    for other, is_given in {
        "a mocked world, where no other rank has a load": is_mocked(args),
        f"{ending}, which ends the run": bool(ending),
        f"--optimizer {args.optimizer}": args.optimizer not in _OPTIMIZERS,
        "--use-precision-aware-optimizer": args.use_precision_aware_optimizer,
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
        "--fp8-format, whose scaling factors stay on their rank": bool(args.fp8),
        "--moe-pad-expert-input-to-capacity, by which all experts get equally many rows": (
            args.moe_pad_expert_input_to_capacity
        ),
    }.items():
        if is_given:
            raise UsageError(f"{flag} does not work with {other}. Drop one of the two.")


class Rebalancer:
    """Measures the load of experts over windows of steps, and moves experts at their ends."""

    def __init__(
        self,
        args: argparse.Namespace,
        interval: int,
        setup: OverlapSetup,
        recorder: StepRecorder,
        is_settled: Callable[[], bool],
        layout: Nodes | None,
    ) -> None:
        """
        Args:
            interval: steps of a window.
            is_settled: returns whether the run has its final plan; the same on all ranks.
            layout: how expert-parallel groups lie on nodes; None if they don't, or it is unknown.
        """
        self._args = args
        self._interval = interval
        self._setup = setup
        self._recorder = recorder
        self._is_settled = is_settled
        self._ranks_per_node = layout.ranks_per_node if layout is not None else None
        self._rows: ExpertRows | None = None
        self._first: ExpertLoad | None = None
        self._num_steps = 0
        self._moved: tuple[int, float] | None = None
        self._has_decided = False
        self._optimizer: Any = None

    def take_optimizer(self, optimizer: Any) -> None:
        """Takes Megatron's optimizer, which each of its training steps receives."""
        self._optimizer = optimizer

    def observe(self, step: Callable[[], Any]) -> Any:
        """Runs a training step and counts its rows; after the last one of a window, moves experts if that pays."""
        if not self._is_settled():
            self._num_steps = 0
            return step()
        if self._rows is None:
            self._rows = ExpertRows(parallel_state.get_expert_tensor_parallel_world_size())
        if self._num_steps == 0:
            self._rows.take()
        comm = self._comm
        comm.use(replace(comm.settings, expert_rows=self._rows.add))
        try:
            result = step()
        finally:
            comm.use(replace(comm.settings, expert_rows=None))
        self._num_steps += 1
        half = self._interval // 2
        if self._num_steps == half:
            self._first = gathered_load(self._setup.stages, self._rows, half)
        elif self._num_steps == self._interval:
            second = gathered_load(self._setup.stages, self._rows, self._interval - half)
            self._num_steps = 0
            if self._first is not None and second is not None:
                self._rebalance(self._first, second)
        return result

    @property
    def _comm(self) -> Comm:
        return self._setup.stages[0].decoder.comm

    def _rebalance(self, first: ExpertLoad, second: ExpertLoad) -> None:
        placements = present_placement(self._setup.stages)
        costs = self._costs()
        found = decide(first, second, placements, costs, self._ranks_per_node)
        if not found.swaps:
            self._say_that_none_moved(costs)
            return
        beside = tensors_beside(self._optimizer)
        start_s = time.perf_counter()
        num_bytes = 0
        for moe in layers_with_experts(self._setup.stages):
            if moe.number in found.swaps:
                after = swapped(placements[moe.number], found.swaps[moe.number])
                num_bytes += place_experts(moe, after, beside)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._moved = num_bytes, (time.perf_counter() - start_s) * 1e3
        self._has_decided = True
        self._say(found)

    def _costs(self) -> Costs:
        """The run's figures of the window. Collective over all ranks."""
        records = self._recorder.records[-self._interval :]
        steps = [
            StepTimes(record.step_ms, record.comm.exposed_ms + record.comm.counts_exposed_ms, record.comm.all_to_all_ms)
            for record in records
        ]
        own_rate = median(record.comm.all_to_all_ms / max(1, record.comm.payload_bytes) for record in records)
        if self._moved is not None and self._moved[0]:
            own_rate = self._moved[1] / self._moved[0]
        beside = tensors_beside(self._optimizer)
        expert_bytes = max((_expert_bytes(moe, beside) for moe in layers_with_experts(self._setup.stages)), default=0)
        ranks = from_all_ranks((stats_of_rank(steps).as_row(), own_rate, expert_bytes))
        stats = over_ranks([row for row, _, _ in ranks])
        return Costs(
            exposed_ms=stats.exposed_ms,
            noise_ms=step_noise_ms(stats, stats),
            expert_bytes=max(num_bytes for *_, num_bytes in ranks),
            ms_per_byte=max(rate for _, rate, _ in ranks),
            num_steps=self._interval,
        )

    def _say_that_none_moved(self, costs: Costs) -> None:
        """Prints why the first decision moves no expert; later decisions like this are not printed."""
        if not self._has_decided:
            say(
                f"Megatron-Lancet experts: no experts moved after step {self._args.curr_iteration + 1}: no swap pays "
                f"for itself beyond the noise ({costs.noise_ms:.1f} ms a step). Swaps are considered every "
                f"{costs.num_steps} steps; from now on only swaps are logged"
            )
        self._has_decided = True

    def _say(self, found: Rebalance) -> None:
        """Prints what was moved, and keeps the placement for a restart. Collective over all ranks."""
        assert self._moved is not None
        num_bytes, ms = (max(values) for values in zip(*from_all_ranks(self._moved), strict=True))
        placements = present_placement(self._setup.stages)
        where = ""
        if self._args.save and "://" not in self._args.save:
            path = Path(self._args.save) / PLACEMENT_FILE
            if dist.get_rank() == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(path, placement_to_json(placements))
            where = f"; a restart goes on with --lancet-expert-placement {path}"
        num_swaps = sum(map(len, found.swaps.values()))
        say(
            f"Megatron-Lancet experts: {num_swaps} pair{'s' if num_swaps != 1 else ''} of experts in layers "
            f"{', '.join(map(str, found.swaps))} have changed ranks after step {self._args.curr_iteration + 1}: "
            f"most loaded rank {found.before:.2f} of the mean, {found.after:.2f} now; {found.gain_ms:.1f} ms a step "
            f"expected; {num_bytes / 1e6:.1f} MB from a rank in {ms:.0f} ms{where}"
        )


def _expert_bytes(moe: Any, beside: OptimizerTensors) -> int:
    """The tensors that move with one expert of a layer: weights, main copies and moments."""
    slots_of(moe)  # makes experts that were never moved return their parameters by slot
    return sum(
        tensor.nbytes
        for parameter in parameters_of_slots(moe.stock.experts)[0]
        for tensor in (parameter, *beside(parameter))
    )
