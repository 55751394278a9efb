"""Summarises a run in a few lines of text and in report.json."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.files.reader import from_plain
from megatron_lancet.files.records import to_plain
from megatron_lancet.files.report_folder import REPORT_FILE
from megatron_lancet.report.exposed import ExposedTable
from megatron_lancet.runtime.comm_stats import CommTimes, Counter

NUM_REPORT_WARM_UP_STEPS = 3
"""Steps outside the report's medians: the first ones allocate, connect and record the order of reductions."""
_PEAK = "peak_dw_bytes"
_EXPOSED = "exposed"


@dataclass(frozen=True)
class StepRecord:
    """One training step on one rank.

    Attributes:
        step_ms: wall clock time of forward, backward, gradient reduction and optimizer.
        num_tokens: tokens of all ranks' micro-batches in the step.
    """

    step_ms: float
    num_tokens: int
    comm: CommTimes


def rank_medians(records: Sequence[StepRecord]) -> dict[str, float]:
    """Returns medians over the steps after warm-up, or over all steps if there are no others.

    Peaks and sums, see :class:`~megatron_lancet.runtime.comm_stats.Counter`, are over all steps.
    """
    steady = records[NUM_REPORT_WARM_UP_STEPS:] or records
    rows = [{"step_ms": r.step_ms, "num_tokens": r.num_tokens, **asdict(r.comm)} for r in steady]
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    comms = [record.comm for record in records]
    peaks = {name: max(getattr(comm, name) for comm in comms) for name in _named(Counter.PEAK)}
    sums = {name: sum(getattr(comm, name) for comm in comms) for name in _named(Counter.SUM)}
    return {**medians, **peaks, **sums}


def tokens_per_second(records: Sequence[StepRecord]) -> float:
    """Tokens over time of the steps after warm-up, or of all steps if there are no others: steps differ in tokens."""
    steady = records[NUM_REPORT_WARM_UP_STEPS:] or records
    return sum(record.num_tokens for record in steady) / sum(record.step_ms for record in steady) * 1e3


def summarise(
    per_rank: Sequence[dict[str, float]],
    plan: str,
    num_steps: int,
    dw_memory_bytes: int | None = None,
    exposed: ExposedTable | None = None,
    first_step: int = 1,
) -> dict[str, Any]:
    """Returns the report: the slowest rank's step, the highest peak, and means over ranks for the rest.

    Args:
        per_rank: :func:`rank_medians` of every rank.
        plan: text of the plan, ``off`` for stock modules.
        num_steps: training steps under the plan, warm-up included.
        dw_memory_bytes: bound of the plan for deferred weight gradients, None without one.
        exposed: exposed communication of a traced step; without one the report has no such key.
        first_step: number of the first step under the plan, as in Megatron's log.
    """
    step_ms = max(rank["step_ms"] for rank in per_rank)
    means = {
        name: statistics.fmean(rank[name] for rank in per_rank)
        for name in per_rank[0]
        if name not in ("step_ms", "num_tokens")
    }
    return {
        "plan": plan,
        "first_step": first_step,
        "num_steps": num_steps,
        "num_warm_up_steps": NUM_REPORT_WARM_UP_STEPS if num_steps > NUM_REPORT_WARM_UP_STEPS else 0,
        "tokens_per_s": per_rank[0]["num_tokens"] / step_ms * 1e3,
        "step_ms": step_ms,
        **means,
        **{name: max(rank[name] for rank in per_rank) for name in (*_named(Counter.PEAK), *_named(Counter.SUM))},
        "dw_memory_bytes": dw_memory_bytes,
        "ranks": list(per_rank),
        **({} if exposed is None else {_EXPOSED: to_plain(exposed)}),
    }


def as_text(report: dict[str, Any], source: Sequence[str] = ()) -> str:
    """Returns the report as a few lines of text.

    Args:
        source: lines on how the plan was found.
    """
    step_ms = report["step_ms"]
    before = report["first_step"] - 1
    steps = f"{before + report['num_warm_up_steps'] + 1} to {before + report['num_steps']}"
    lines = [
        f"Megatron-Lancet report: {report.get('verdict', report['plan'])}",
        *([f"  run                {about(report['run'])}"] if "run" in report else []),
        f"  plan               {report.get('plan_text', report['plan'])}",
        *(f"  {line}" for line in source),
        f"  figures            medians over steps {steps}",
        f"  throughput         {_throughput(report)}",
        f"  step               {step_ms:.1f} ms",
        *_all_to_alls(report),
        *_peak_memory(report),
    ]
    num_dw = report["num_dw_in_gaps"] + report["num_dw_early"] + report["num_dw_late"]
    if num_dw:
        bound, early = report["dw_memory_bytes"], ""
        if bound is not None:
            early = f" of {bound / 1e6:.1f} MB, {report['num_dw_early']:.0f} ran early for lack of memory"
        lines.append(
            f"  weight gradients   {report['num_dw_in_gaps']:.0f} of {num_dw:.0f} in front of waits for all-to-alls, "
            f"at most {report[_PEAK] / 1e6:.1f} MB deferred{early}"
        )
    if _EXPOSED in report:
        table = from_plain(ExposedTable, report[_EXPOSED], f"{REPORT_FILE}.{_EXPOSED}")
        lines += [f"  {line}" for line in table.as_text().splitlines()]
    return "\n".join(lines)


def _all_to_alls(report: dict[str, Any]) -> list[str]:
    if "exposed_ms" not in report:
        return ["  all-to-all         not timed with this dispatcher; pass --moe-token-dispatcher-type alltoall"]
    exposed_ms = report["exposed_ms"] + report["counts_exposed_ms"]
    return [
        f"  all-to-all         {report['all_to_all_ms']:.1f} ms in flight",
        f"    exposed          {report['exposed_ms']:.1f} ms waited for payload, "
        f"{report['counts_exposed_ms']:.1f} ms for counts: {100 * exposed_ms / report['step_ms']:.1f} % of the step",
    ]


def _peak_memory(report: dict[str, Any]) -> list[str]:
    if (peak_bytes := report.get("peak_memory_bytes")) is None:
        return []
    unit = report["run"]["unit"]
    kind = "allocated" if unit == "GPU" else "of the process, resident"
    return [f"  peak memory        {peak_bytes / 1e9:.2f} GB a {unit} at most, {kind}"]


def about(run: dict[str, Any]) -> str:
    """Model, ranks and date in a line.

    Args:
        run: ``report.json``'s part of this name.
    """
    ranks = f"{run['num_ranks']} ranks on {run['device']}{'s' if run['unit'] == 'GPU' else ''}"
    return f"{run['model']}; {ranks}; {run['date']}"


def _throughput(report: dict[str, Any]) -> str:
    all_per_s, num_ranks = report["tokens_per_s"], len(report["ranks"])
    unit = report.get("run", {}).get("unit", "rank")
    text = f"{all_per_s / num_ranks:.0f} tokens/s a {unit}, {all_per_s:.0f} in all"
    if (tflops := report.get("tflops_per_s")) is not None:
        text += f"; {tflops:.4g} TFLOP/s a {unit} as Megatron counts"
    if (mfu := report.get("mfu")) is not None:
        text += f", {100 * mfu:.1f} % of its peak in bf16 (MFU)"
    return text


def write_json(report: dict[str, Any], folder: Path) -> Path:
    """Writes ``report.json`` into ``folder`` atomically; creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REPORT_FILE
    atomic_write(path, json.dumps(report, indent=2) + "\n")
    return path


def _named(kind: Counter) -> list[str]:
    """Names of the counters of a kind."""
    return [entry.name for entry in fields(CommTimes) if entry.metadata.get(Counter) is kind]
