"""Times Megatron's training steps and reports them at the end of the run."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training.global_vars import get_tensorboard_writer

from megatron_lancet.report.exposed import ExposedTable
from megatron_lancet.report.summary import StepRecord, as_text, rank_medians, summarise, write_json
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.observe.scalars import write_scalars
from megatron_lancet.training.process.console import say

_MIN_KEPT = 1_000
"""Minimum number of steps whose records are kept: a run may have millions, and a median needs no more."""


class StepRecorder:
    """Collects a :class:`StepRecord` per training step of this rank.

    Attributes:
        records: records of the last steps, at least ``num_kept`` of them, the newest last.
        num_done: steps since the start of the run.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, stats: CommStats, num_kept: int) -> None:
        self._args = args
        self._device = device
        self._stats = stats
        self.records: list[StepRecord] = []
        self.num_done = 0
        self._first = 0
        self._num_kept = max(_MIN_KEPT, num_kept)

    @property
    def num_steps(self) -> int:
        """Number of kept steps since the plan changed."""
        return len(self.records) - self._first

    def restart(self) -> None:
        """Report only the steps from here on, because the plan changes."""
        self._first = len(self.records)

    def observe(self, step: Callable[[], Any]) -> Any:
        """Run a training step and record it."""
        self._stats.take()  # drops what evaluation and checkpoints have sent since the last step
        start_s = time.perf_counter()
        result = step()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        step_ms = (time.perf_counter() - start_s) * 1e3
        args = self._args
        samples = args.micro_batch_size * args.data_parallel_size * get_num_microbatches()
        self.records.append(StepRecord(step_ms, samples * args.seq_length, self._stats.take()))
        self.num_done += 1
        surplus = len(self.records) - self._num_kept
        if surplus > self._num_kept:
            del self.records[:surplus]
            self._first = max(0, self._first - surplus)
        iteration = args.curr_iteration + 1  # Megatron counts done steps, and names its own scalars after this one
        if iteration % args.tensorboard_log_interval == 0:
            write_scalars(get_tensorboard_writer(), iteration, self.records[-1])
        return result

    def report(
        self,
        plan: Plan | None,
        folder: Path | None,
        tuning: dict[str, Any] | None = None,
        exposed: ExposedTable | None = None,
    ) -> None:
        """Gather all ranks' figures and print the report on rank 0. Collective; all ranks ran the same steps.

        Args:
            plan: plan of the last steps; None for stock modules.
            folder: folder for report.json; None writes no file.
            tuning: how the plan was found, see :func:`~megatron_lancet.report.tuning.tuning_text`; None if given.
            exposed: exposed communication by layer and chunk, on rank 0; None if no step was traced.
        """
        if not self.records:
            return
        if self._first == len(self.records):  # the plan has changed after the last step
            self._first = 0
        per_rank: list[dict[str, float] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(per_rank, rank_medians(self.records[self._first :]))
        if dist.get_rank() != 0:
            return
        report = summarise(
            [rank for rank in per_rank if rank is not None],
            str(plan) if plan is not None else "off",
            len(self.records) - self._first,
            plan.dw_memory_bytes if plan is not None else None,
            exposed=exposed,
            first_step=self.num_done - len(self.records) + self._first + 1,
        )
        if tuning is not None:
            report["tuning"] = tuning
        say(as_text(report))
        if folder is not None:
            say(f"  written to         {write_json(report, folder)}")
