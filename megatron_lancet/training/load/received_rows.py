"""``--lancet-max-received-rows``: how many rows of a chunk the experts of a rank may work on at a time.

With ``auto`` the bound follows from memory that is measured when a few steps have run under the plan. Every received
row keeps bytes alive until its backward pass, and every chunk whose backward pass is still to come may have as many
rows as the bound allows, so the bound is

    mean rows of a chunk so far + usable room / (bytes that a row keeps * (chunks that are kept at a time + 2))

with the room that a rank can still allocate beyond its peak, of which fragmentation takes a part; two more chunks stand
for the gradients and the copies of the one that is worked on. All ranks take the smallest bound of any.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_lancet.config import LancetConfig, RowLimitChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.report.summary import StepRecord
from megatron_lancet.runtime.collectives import from_all_ranks
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.plan.support import micro_batch_shape
from megatron_lancet.training.platform.launcher import is_mocked
from megatron_lancet.training.process.console import say
from megatron_lancet.training.saved_tensors import expert_row_bytes
from megatron_lancet.training.tuning.controller import NUM_TUNING_WARM_UP_STEPS
from megatron_lancet.training.tuning.memory_budget import USABLE_SHARE, least_room_bytes

FLAG = "--lancet-max-received-rows"
_CHUNKS_AT_WORK = 2
"""Chunks' worth of memory for the one that is worked on, beside what is kept of it."""


def check_row_limit(args: argparse.Namespace, config: LancetConfig, plan: Plan | None) -> None:
    """
    Args:
        args: Megatron's arguments, validated.
        plan: None for stock modules.

    Raises:
        UsageError: a limit is given to a run that can't follow it, or does not need it.
    """
    if config.max_received_rows is None:
        return
    flag = f"{FLAG} {config.max_received_rows}"
    if args.expert_model_parallel_size == 1:
        raise UsageError(
            f"{flag} bounds the rows that experts receive from other ranks, but --expert-model-parallel-size is 1 and "
            "none are sent. Drop the flag."
        )
    if plan is None:
        raise UsageError(
            f"{flag} needs the overlapping block, but this run has stock Megatron modules, which receive all rows at "
            "once. Drop it, or --lancet-plan off."
        )
    if args.moe_pad_expert_input_to_capacity:
        raise UsageError(
            f"{flag} would change nothing: with --moe-pad-expert-input-to-capacity every expert receives equally many "
            "rows. Drop one of the two."
        )
    if is_mocked(args):
        raise UsageError(
            f"{flag} needs the token counts of all ranks, but in a mocked world only one rank exists. Drop it, or "
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


class ReceivedRows:
    """Bounds the rows of a run, as far as the bound has to be measured, and says when the first chunk was split."""

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
        self._is_measured = config.max_received_rows is not RowLimitChoice.AUTO
        self._is_told = False

    def observe(self, step: Callable[[], Any]) -> Any:
        """Run a training step; bound the next ones once enough of them have run under the plan."""
        result = step()
        split = self._setup.first_split
        if split is not None and not self._is_told:
            self._is_told = True
            if dist.get_rank() == 0:
                say(
                    f"Megatron-Lancet received rows: in step {self._args.curr_iteration + 1} {split.op} "
                    f"({split.op.in_words()}) would have brought {split.num_rows} rows to expert-parallel rank "
                    f"{split.rank}, more than {self._setup.max_expert_rows}. It went in {split.num_rounds} rounds; so "
                    "will others"
                )
        if not self._is_measured and self._is_settled() and self._recorder.num_steps >= NUM_TUNING_WARM_UP_STEPS:
            self._is_measured = True
            self._bound()
        return result

    def _bound(self) -> None:
        """Collective over all ranks."""
        args, steps = self._args, self._recorder.records[-NUM_TUNING_WARM_UP_STEPS:]
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
        self._setup.limit_expert_rows(None if fits else bound)
        if dist.get_rank() != 0:
            return
        room = f"the {room_bytes / 1e6:.0f} MB that every rank has left"
        found = f"at most {bound} of a chunk on a rank at a time, for which {room} are enough"
        if fits:
            found = f"no bound is needed, because all {most} rows of a micro-batch fit on one rank in {room}"
        say(f"Megatron-Lancet received rows: {found}")
