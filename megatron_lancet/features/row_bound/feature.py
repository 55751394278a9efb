"""``--lancet-max-expert-rows``: the most rows of a chunk that the experts of a rank process at a time.

With ``auto`` the bound follows from memory that is measured when a few steps have run under the plan. Every received
row keeps bytes alive until its backward pass, and every chunk whose backward pass is still to come may have as many
rows as the bound allows, so the bound is

    mean rows of a chunk so far + usable room / (bytes that a row keeps * (chunks that are kept at a time + 2))

with the room that a rank can still allocate beyond its peak, of which fragmentation takes a part; two more chunks stand
for the gradients and the copies of the chunk in work. All ranks take the smallest bound of any.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature, Feature, RunFacts
from megatron_lancet.feature_parts import PlanBlocker, PlanPart
from megatron_lancet.flags import CheckedFlags, flag
from megatron_lancet.model.gpt import check_plan
from megatron_lancet.planning.sizes.saved_tensors import expert_row_bytes
from megatron_lancet.report.summary import StepRecord
from megatron_lancet.runtime.collectives import from_all_ranks
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.observe.step_stats import NUM_WARM_UP_STEPS
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.plan.memory_budget import USABLE_SHARE, least_room_bytes
from megatron_lancet.training.plan.support import micro_batch_shape
from megatron_lancet.training.platform.launcher import is_mocked
from megatron_lancet.training.process.console import say
from megatron_lancet.training.run import OverlappedRun, Run

FLAG = "--lancet-max-expert-rows"
_CHUNKS_AT_WORK = 2
"""Chunks' worth of memory for the chunk in work, in addition to its kept tensors."""
KEY = "max_expert_rows"
"""In ``report.json``."""


class RowLimitChoice(StrEnum):
    """Source of the most rows that a rank may receive of a chunk, other than a number."""

    AUTO = "auto"
    """The rows that fit into the memory that is free after the first steps."""


def _row_limit(text: str) -> "int | RowLimitChoice":
    """
    Raises:
        UsageError: the text is neither a word nor a number above 0.
    """
    if text in list(RowLimitChoice):
        return RowLimitChoice(text)
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(
            f"--lancet-max-expert-rows expects auto, or a number of rows above 0, got {text}. Without the flag there "
            "is no bound."
        )
    return int(text)


@dataclass(frozen=True)
class RowBoundFlags(CheckedFlags):
    """The bound."""

    max_expert_rows: int | RowLimitChoice | None = flag(
        None,
        same_on_all_ranks=True,
        read=_row_limit,
        metavar="{auto,N}",
        help="bound the memory of experts under uneven routing: the experts of a rank process at most N rows of a "
        "chunk at a time (a row is a token and one of its experts). A chunk with more rows is sent in several rounds; "
        "no token is dropped and no step is repeated. auto: N from the memory that is free after the first steps. "
        "Default: no bound.",
    )


class RowBound(Feature):
    """``--lancet-max-expert-rows``."""

    name = "row_bound"
    flags = RowBoundFlags

    def needs_plan(self, config: LancetConfig) -> bool:
        """Whether there is a bound."""
        return config.of(RowBoundFlags).max_expert_rows is not None

    def plan_blockers(self, part: PlanPart, args: argparse.Namespace, config: LancetConfig) -> Iterator[PlanBlocker]:
        """Tiles."""
        if part is PlanPart.TILES and self.needs_plan(config):
            yield PlanBlocker(f"{FLAG} sends a chunk in rounds, which have no tiles", f"drop {FLAG}")

    def check(self, facts: RunFacts) -> None:
        """Refuses a bound that the run can't follow, or does not need."""
        check_row_limit(facts.args, facts.config, facts.plan)

    def start(self, run: Run) -> "NoBound":
        """Bounds the run's rows."""
        if not isinstance(run, OverlappedRun) or not self.needs_plan(run.config):
            return NoBound()
        return ReceivedRows(run.facts.args, run.config, run.setup, run.recorder, run.device, run.is_settled)


def check_row_limit(args: argparse.Namespace, config: LancetConfig, plan: Plan | None) -> None:
    """
    Args:
        args: Megatron's arguments, validated.
        plan: None for stock modules.

    Raises:
        UsageError: a limit is given to a run that can't follow it, or does not need it.
    """
    limit = config.of(RowBoundFlags).max_expert_rows
    if limit is None:
        return
    given = f"{FLAG} {limit}"
    if args.expert_model_parallel_size == 1:
        raise UsageError(
            f"{given} bounds the rows that experts receive from other ranks, but --expert-model-parallel-size is 1 and "
            "none are sent. Drop the flag."
        )
    if plan is None:
        raise UsageError(
            f"{given} needs the overlapping block, but this run has stock Megatron modules, which receive all rows at "
            "once. Drop it, or --lancet-plan off."
        )
    if args.moe_pad_expert_input_to_capacity:
        raise UsageError(
            f"{given} would change nothing: with --moe-pad-expert-input-to-capacity every expert receives equally many "
            "rows. Drop one of the two."
        )
    if is_mocked(args):
        raise UsageError(
            f"{given} needs the token counts of all ranks, but in a mocked world only one rank exists. Drop it, or "
            "start the ranks."
        )


def bound_of_memory(
    records: list[StepRecord], row_bytes: float, num_micro_batches: int, num_in_flight: int, room_bytes: int
) -> int | None:
    """The most rows of a chunk for which a rank has memory; None if it has no experts.

    Args:
        records: steps of this rank.
        row_bytes: bytes that a row keeps.
        num_micro_batches: of a step.
        num_in_flight: micro-batches whose activations are kept at a time, at most.
        room_bytes: bytes that can be allocated beyond the peak of these steps.
    """
    num_chunks = sum(record.comm.num_chunks for record in records)
    if not num_chunks:
        return None
    mean_rows = sum(record.comm.num_expert_rows for record in records) / num_chunks
    kept = num_chunks / len(records) / num_micro_batches * num_in_flight
    return max(1, int(mean_rows + USABLE_SHARE * room_bytes / (row_bytes * (kept + _CHUNKS_AT_WORK))))


def most_rows(args: argparse.Namespace, config: LancetConfig) -> int:
    """Rows of a micro-batch on a rank to which all tokens go."""
    ranks = args.expert_model_parallel_size
    holders = int(args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    shared_by = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    tokens = math.prod(micro_batch_shape(args, config)) // shared_by
    return tokens * ranks * holders * min(args.moe_router_topk, args.num_experts // ranks)


def _lines(report: Mapping[str, Any]) -> list[str]:
    """The line on chunks with too many rows for a rank, if there was a bound."""
    bound = report[KEY]
    if bound is None and not report["num_split_chunks"]:
        return []
    line = f"received rows      at most {report['peak_expert_rows']:.0f} of a chunk on a rank at a time"
    if bound is not None:
        since = " before the bound was measured" if report["peak_expert_rows"] > bound else ""
        line += f"{since}, {bound} are allowed"
    if not report["num_split_chunks"]:
        return [f"{line}; no chunk had more"]
    return [
        f"{line}; {report['num_split_chunks']:.0f} of {report['num_chunks']:.0f} chunks, in "
        f"{report['num_split_steps']:.0f} of {report['num_steps']} steps, went in up to {report['most_rounds']:.0f} "
        "rounds"
    ]


def limit_rows(setup: OverlapSetup, max_rows: int | None) -> None:
    """Bounds the rows of a chunk that a rank's experts process at a time. On all ranks, between two steps.

    Args:
        setup: has built its model.
        max_rows: None for any number.

    Raises:
        UsageError: the plan does not work with a bound.
    """
    for stage in setup.stages:
        check_plan(setup.plan, stage, max_rows)
    comm = setup.stages[0].decoder.comm
    comm.use(replace(comm.settings, max_expert_rows=max_rows))


class NoBound(ActiveFeature):
    """A run without a bound, whose report says so."""

    def summary(self) -> Mapping[str, Any]:
        """No bound."""
        return {KEY: None}

    def lines(self, report: Mapping[str, Any]) -> Sequence[str]:
        """The line on chunks with too many rows for a rank, if there was a bound."""
        return _lines(report)


class ReceivedRows(NoBound):
    """Bounds the rows of a run, measures the bound with ``auto``, and reports the first chunk that is split."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: LancetConfig,
        setup: OverlapSetup,
        recorder: StepRecorder,
        device: torch.device,
        is_settled: Callable[[], bool],
    ) -> None:
        """
        Args:
            is_settled: returns whether the run has its final plan; the same on all ranks.
        """
        self._args, self._config = args, config
        self._setup = setup
        self._recorder = recorder
        self._device = device
        self._is_settled = is_settled
        limit = config.of(RowBoundFlags).max_expert_rows
        self._given = limit if isinstance(limit, int) else None
        self._is_measured = limit is not RowLimitChoice.AUTO
        self._num_updates = 0
        self._is_told = False

    def comm_settings(self) -> Mapping[str, Any]:
        """The bound that is given."""
        return {"max_expert_rows": self._given}

    def summary(self) -> Mapping[str, Any]:
        """The bound of the last step."""
        return {KEY: self._comm.settings.max_expert_rows}

    @property
    def _comm(self) -> Comm:
        return self._setup.stages[0].decoder.comm

    def observe(self, step: Callable[[], Any]) -> Any:
        """Run a training step; bound the next ones once enough of them have run under the plan."""
        if self._given is None and self._is_measured and not self._is_settled():
            limit_rows(self._setup, None)
            self._is_measured = False
        result = step()
        split = self._comm.stats.first_split
        if split is not None and not self._is_told:
            self._is_told = True
            if dist.get_rank() == 0:
                say(
                    f"Megatron-Lancet received rows: in step {self._args.curr_iteration + 1} {split.op} "
                    f"({split.op.description()}) would exceed the limit on EP rank {split.rank} ({split.num_rows} > "
                    f"{self._comm.settings.max_expert_rows} rows); sent in {split.num_rounds} rounds. Further splits "
                    "appear in the report"
                )
        if not self._is_measured:
            self._num_updates += not self._was_skipped(result)
            num_steps = min(self._recorder.num_steps, self._num_updates)
            if self._is_settled() and num_steps >= NUM_WARM_UP_STEPS:
                self._is_measured = True
                self._bound()
        return result

    def _was_skipped(self, result: Any) -> bool:
        """Whether a step changed no weight: the optimizer allocates its state in the first one that does. Collective in
        fp16, where steps are skipped until the loss scale fits.
        """
        # Megatron's train_step returns (losses, skipped, ...); a library's step says nothing about the optimizer.
        return bool(self._args.fp16) and any(from_all_ranks(isinstance(result, tuple) and bool(result[1])))

    def _bound(self) -> None:
        """Collective over all ranks."""
        args, steps = self._args, self._recorder.records[-NUM_WARM_UP_STEPS:]
        num_micro_batches = get_num_microbatches()
        num_stages = args.pipeline_model_parallel_size
        # With virtual stages the first rank keeps less than two micro-batches of each pipeline rank.
        in_flight = 2 * num_stages if num_stages > 1 or self._setup.plan.is_paired else 1
        room_bytes = least_room_bytes(self._device)
        own = bound_of_memory(
            steps, expert_row_bytes(args), num_micro_batches, min(in_flight, num_micro_batches), room_bytes
        )
        bound = min(rows for rows in from_all_ranks(own) if rows is not None)
        most = most_rows(args, self._config)
        fits = bound >= most
        limit_rows(self._setup, None if fits else bound)
        if dist.get_rank() != 0:
            return
        room = f"the {room_bytes / 1e6:.0f} MB that are free on every rank"
        found = f"at most {bound} of a chunk on a rank at a time, for which {room} are enough"
        if fits:
            found = f"no bound is needed, because all {most} rows of a micro-batch fit on one rank in {room}"
        say(f"Megatron-Lancet received rows: {found}")


ROW_BOUND = RowBound()
