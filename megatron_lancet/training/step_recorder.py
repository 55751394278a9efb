"""Times Megatron's training steps and makes the closing report of them."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_lancet.report.summary import StepRecord, as_text, rank_medians, summarise, write_json
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.schedule.plan import Plan


class StepRecorder:
    """Collects a :class:`StepRecord` per training step of this rank."""

    def __init__(self, args: argparse.Namespace, device: torch.device, stats: CommStats) -> None:
        self._args = args
        self._device = device
        self._stats = stats
        self.records: list[StepRecord] = []

    def observe(self, step: Callable[[], Any]) -> Any:
        """Run a training step and record it."""
        self._stats.take()  # what evaluation and checkpoints sent since the last step is not this step's
        start_s = time.perf_counter()
        result = step()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        step_ms = (time.perf_counter() - start_s) * 1e3
        args = self._args
        samples = args.micro_batch_size * args.data_parallel_size * get_num_microbatches()
        self.records.append(StepRecord(step_ms, samples * args.seq_length, self._stats.take()))
        return result

    def report(self, plan: Plan | None, folder: Path | None) -> None:
        """Gather all ranks' figures and print the report on rank 0. Collective; all ranks ran the same steps.

        Args:
            plan: of the run, None for stock modules.
            folder: where report.json goes, None for no file.
        """
        if not self.records:
            return
        per_rank: list[dict[str, float] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(per_rank, rank_medians(self.records))
        if dist.get_rank() != 0:
            return
        report = summarise(
            [rank for rank in per_rank if rank is not None],
            str(plan) if plan is not None else "off",
            len(self.records),
            plan.dw_memory_bytes if plan is not None else None,
        )
        print(as_text(report), flush=True)
        if folder is not None:
            print(f"  written to         {write_json(report, folder)}", flush=True)
