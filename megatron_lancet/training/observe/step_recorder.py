"""Times Megatron's training steps and reports them at the end of the run."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_lancet.feature import ActiveFeature, Steering
from megatron_lancet.files.records import to_plain
from megatron_lancet.plan_words import plan_text
from megatron_lancet.report.exposed import ExposedTable
from megatron_lancet.report.history import StepHistory
from megatron_lancet.report.summary import (
    StepRecord,
    as_text,
    rank_medians,
    summarise,
    write_json,
)
from megatron_lancet.runtime.comm_stats import CommStats, EventPair, OpenTimes
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.observe.run_figures import peak_memory_bytes, rates, run_facts
from megatron_lancet.training.observe.scalars import MESSAGE_TIMES, megatrons_writer, write_scalars
from megatron_lancet.training.plan.support import OWN_DISPATCHER
from megatron_lancet.training.process.console import say

_MIN_KEPT = 1_000
"""Minimum number of steps whose records are kept: a run may have millions, and a median needs no more."""


class _OpenStep(NamedTuple):
    """A step that was launched, and whose figures have not been read.

    Attributes:
        duration: on CUDA the events at its begin and end, elsewhere milliseconds.
        iteration: number of the step, from 1.
    """

    duration: EventPair | float
    num_tokens: int
    times: OpenTimes
    iteration: int


class StepRecorder:
    """Collects a :class:`StepRecord` per training step of this rank.

    On CUDA steps are timed with events, which are read when the next step has been launched: the device always has work
    to do at a step's end, and reading them waits once, for the end of a step that lies behind. Whoever reads
    :attr:`records` earlier waits for the device, and gets the figures of all steps.

    Attributes:
        num_done: steps since the start of the run.
        features: the run's features, with keys and lines of their own; read when a step has run.
        history: all steps of this rank.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        device: torch.device,
        stats: CommStats,
        features: Sequence[ActiveFeature] = (),
    ) -> None:
        self._args = args
        self.features = features
        self._device = device
        self._stats = stats
        self._records: list[StepRecord] = []
        self._open: _OpenStep | None = None
        self.history = StepHistory()
        self.num_done = 0
        self._last_iteration = 0
        self._first = 0
        self._num_kept = _MIN_KEPT

    def keep(self, num_steps: int) -> None:
        """Keeps the records of the last ``num_steps`` steps or more."""
        self._num_kept = max(self._num_kept, num_steps)

    @property
    def records(self) -> list[StepRecord]:
        """Records of the last steps, see :meth:`keep`; the newest last. Waits for the device."""
        self._read()
        return self._records

    @property
    def reported(self) -> list[StepRecord]:
        """Records of the steps under the present plan; all records if it has changed after the last step."""
        return self.records[self._first :] or self._records

    @property
    def _num_recorded(self) -> int:
        return len(self._records) + (self._open is not None)

    @property
    def num_steps(self) -> int:
        """Number of kept steps since the plan changed."""
        return self._num_recorded - self._first

    @property
    def iteration(self) -> int:
        """Number of the step that runs, or has just run, from 1, as in Megatron's log and scalars."""
        return int(self._args.curr_iteration) + 1  # Megatron counts done steps, and goes on when the hooks are through

    def restart(self) -> None:
        """Report only the steps from here on, because the plan changes."""
        self._first = self._num_recorded

    def observe(self, step: Callable[[], Any]) -> Any:
        """Run a training step and record it."""
        self._stats.close()  # drops what evaluation and checkpoints have sent since the last step
        result, duration = self._timed(step)
        self._read()
        self._open = _OpenStep(duration, self._num_tokens(), self._stats.close(), self.iteration)
        self.num_done += 1
        if not isinstance(duration, EventPair):
            self._read()
        return result

    def _num_tokens(self) -> int:
        """Tokens of the step that has just run, without padding where samples have different lengths."""
        for feature in self.features:
            if (num_tokens := feature.num_tokens()) is not None:
                return num_tokens
        args = self._args
        return int(args.micro_batch_size * args.data_parallel_size * get_num_microbatches() * args.seq_length)

    def _timed(self, step: Callable[[], Any]) -> tuple[Any, EventPair | float]:
        if self._device.type == "cuda":
            pair = EventPair()
            result = step()
            pair.end.record()
            return result, pair
        start_s = time.perf_counter()
        return step(), (time.perf_counter() - start_s) * 1e3

    def _read(self) -> None:
        """Records the last step if that has not been done, and writes its scalars."""
        if self._open is None:
            return
        duration, num_tokens, times, iteration = self._open
        self._open = None
        if isinstance(duration, EventPair):
            duration.end.synchronize()
            duration = duration.elapsed_ms()
        record = StepRecord(duration, num_tokens, times.read())
        self._records.append(record)
        self._last_iteration = iteration
        self.history.add(iteration, duration, record.comm.exposed_ms + record.comm.counts_exposed_ms)
        surplus = len(self._records) - self._num_kept
        if surplus > self._num_kept:
            del self._records[:surplus]
            self._first = max(0, self._first - surplus)
        if iteration % self._args.tensorboard_log_interval == 0:
            write_scalars(megatrons_writer(), iteration, record)

    def report(
        self,
        plan: Plan | None,
        folder: Path | None,
        steering: Steering | None = None,
        exposed: ExposedTable | None = None,
    ) -> dict[str, Any]:
        """Gather all ranks' figures and print the report on rank 0. Collective; all ranks ran the same steps.

        Returns:
            The content of report.json on rank 0; empty on other ranks, and where no step ran.

        Args:
            plan: plan of the last steps; None for stock modules.
            folder: folder for report.json; None writes no file.
            steering: has found the plan; None if the plan was given.
            exposed: exposed communication by layer and chunk, on rank 0; None if no step was traced.
        """
        records = self.records
        if not records:
            return {}
        if (writer := megatrons_writer()) is not None:
            writer.flush()  # Megatron has done so before the last step's scalars were written
        if self._first == len(records):  # the plan has changed after the last step
            self._first = 0
        per_rank: list[dict[str, float] | None] = [None] * dist.get_world_size()
        own = {**rank_medians(records[self._first :]), "peak_memory_bytes": peak_memory_bytes(self._device)}
        dist.all_gather_object(per_rank, own)
        steering = steering or Steering()
        found = [one.summary() for one in (steering, *self.features)]
        if dist.get_rank() != 0:
            return {}
        report = summarise(
            [rank for rank in per_rank if rank is not None],
            "off" if plan is None else str(plan),
            len(records) - self._first,
            plan.dw_memory_bytes if plan is not None else None,
            exposed=exposed,
            first_step=self._last_iteration - len(records) + self._first + 1,
        )
        report |= self._figures(report, plan)
        args = self._args
        if plan is None and args.expert_model_parallel_size > 1 and args.moe_token_dispatcher_type != OWN_DISPATCHER:
            for one in (report, *report["ranks"], *report["steps"]):  # the dispatcher sends no all-to-alls to time
                for name in MESSAGE_TIMES:
                    one.pop(name, None)
        for summary in found:
            report |= summary
        lines = [line for feature in self.features for line in feature.lines(report)]
        report["verdict"] = "stock Megatron modules, without overlap" if plan is None else steering.speed_up(report)
        say("\n".join([as_text(report, steering.lines(report)), *(f"  {line}" for line in lines)]))
        if folder is not None:
            say(f"  written to         {write_json(report, folder)}")
        return report

    def _figures(self, report: dict[str, Any], plan: Plan | None) -> dict[str, Any]:
        """What the report says of the run as a whole. On rank 0."""
        facts = run_facts(self._args, self._device)
        is_packed = getattr(self._args, "dataloader_inter_document_masking", False)
        lengths_vary = is_packed or any(feature.num_tokens() is not None for feature in self.features)
        num_tokens = None if lengths_vary else report["ranks"][0]["num_tokens"]
        return {
            "plan_text": "off" if plan is None else plan_text(plan),
            "run": facts,
            "peak_memory_bytes": max(rank["peak_memory_bytes"] for rank in report["ranks"]),
            **rates(self._args, facts, report["step_ms"], num_tokens),
            "steps": to_plain(self.history.complete()),
        }
