"""Parses the progress lines of Megatron's training loop."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NUMBER = r"([-+]?\d+(?:\.\d*)?(?:[Ee][-+]?\d+)?|[-+]?nan|[-+]?inf)"
_ITERATION = re.compile(r"\] iteration +(\d+)/ *(\d+) \|")
_VALIDATION = re.compile(rf"validation loss at iteration (\d+) on .*\| *lm loss value: {_NUMBER} ")
_RANK_FAILED = re.compile(r"E\d{4} .*torch/distributed/elastic/.*\bexitcode: ")


@dataclass(frozen=True)
class Iteration:
    """One line of Megatron's log with ``--log-interval 1``.

    Megatron logs the first step of a process twice: alone, and in the mean of the first and the second step.

    Attributes:
        number: training step, from 1.
        total: training steps of the whole run, ``--train-iters``.
        lm_loss: nats per token, mean over the global batch; nan if Megatron skipped the step.
        step_ms: wall clock time of the step.
    """

    number: int
    total: int
    lm_loss: float
    step_ms: float


@dataclass(frozen=True)
class Validation:
    """Result of Megatron's evaluation on the validation split: ``lm_loss`` in nats per token after ``iteration``."""

    iteration: int
    lm_loss: float


def parse_iteration(line: str) -> Iteration | None:
    """Returns the step that ``line`` reports, None for other lines."""
    match = _ITERATION.search(line)
    if match is None:
        return None
    lm_loss, step_ms = _field(line, "lm loss"), _field(line, r"elapsed time per iteration \(ms\)")
    return Iteration(int(match[1]), int(match[2]), lm_loss, step_ms)


def parse_validation(line: str) -> Validation | None:
    """Returns the evaluation result that ``line`` reports, None for other lines."""
    match = _VALIDATION.search(line)
    return Validation(int(match[1]), float(match[2])) if match else None


def _field(line: str, name: str) -> float:
    match = re.search(rf"\| {name}: +{_NUMBER} ", line)
    return float(match[1]) if match else math.nan


@dataclass
class RunLog:
    """Steps (in the order of the log) and last evaluation result of a run that consists of one or several parts."""

    iterations: list[Iteration] = field(default_factory=list)
    validation: Validation | None = None

    def feed(self, line: str) -> Iteration | None:
        """Parses a line of the log; returns the step that it reports, if any."""
        iteration = parse_iteration(line)
        if iteration is not None:
            self.iterations.append(iteration)
        self.validation = parse_validation(line) or self.validation
        return iteration

    def is_complete(self, num_iterations: int) -> bool:
        """Whether the log shows steps 1 to ``num_iterations``, each once and in order, and then a validation."""
        in_order = [iteration.number for iteration in self.iterations] == list(range(1, num_iterations + 1))
        return in_order and self.validation is not None and self.validation.iteration == num_iterations

    def results(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the results of a complete run for summary.json.

        Args:
            report: report of the run or of its last part, from :func:`megatron_lancet.report.summary.summarise`.

        Returns:
            ``validation_loss`` in nats per token, ``perplexity``, ``iterations``; from the report ``tokens_per_s``,
            ``plan``, ``step_ms`` and ``exposed_ms``, which here includes the wait for counts.
        """
        assert self.validation is not None, "only a complete run has results"
        return {
            "validation_loss": self.validation.lm_loss,
            "perplexity": math.exp(self.validation.lm_loss),
            "iterations": len(self.iterations),
            "tokens_per_s": report["tokens_per_s"],
            "plan": report["plan"],
            "step_ms": report["step_ms"],
            "exposed_ms": report["exposed_ms"] + report["counts_exposed_ms"],
        }


def results_text(summary: Mapping[str, Any]) -> str:
    """Returns the closing lines of a run.

    Args:
        summary: :meth:`RunLog.results`, ``unigram_entropy`` of the corpus in nats per token, and the run's ``seconds``.
    """
    loss, entropy = summary["validation_loss"], summary["unigram_entropy"]
    verdict = f"the loss is {entropy - loss:.2f} below it" if loss < entropy else "the loss is not yet below it"
    minutes, seconds = divmod(round(summary["seconds"]), 60)
    exposed_percent = 100 * summary["exposed_ms"] / summary["step_ms"]
    return "\n".join(
        [
            f"Megatron-Lancet: {summary['iterations']} steps, {minutes} min {seconds} s in total",
            f"  validation loss    {loss:.3f} nats per token, perplexity {summary['perplexity']:.1f}",
            f"  unigram entropy    {entropy:.3f} nats per token of the whole corpus: {verdict}",
            f"  throughput         {summary['tokens_per_s']:.0f} tokens/s, {summary['step_ms']:.0f} ms a step",
            f"  plan               {summary['plan']}",
            f"  exposed            {exposed_percent:.1f} % of the step, waiting for all-to-alls",
        ]
    )


def tail(log: Path, num_lines: int = 20) -> str:
    """Returns the path of a log and its last lines, for an error message.

    torchrun's stack trace and table, which follow its line about the rank that failed first, are left out.
    """
    lines = log.read_text(errors="replace").splitlines()
    failed = next((number for number, line in enumerate(lines, start=1) if _RANK_FAILED.match(line)), len(lines))
    return f"{log}:\n" + "\n".join(f"  {line}" for line in lines[:failed][-num_lines:])
