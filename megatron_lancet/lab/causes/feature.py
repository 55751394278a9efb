"""``--lancet-diagnose-interval``, and the causes of the step that ``--lancet-report`` traces."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature, Feature, RunFacts
from megatron_lancet.files.reader import from_plain
from megatron_lancet.files.records import to_plain
from megatron_lancet.files.report_folder import REPORT_FILE
from megatron_lancet.flags import CheckedFlags, flag
from megatron_lancet.lab.causes.step import traced_rank
from megatron_lancet.lab.causes.text import CausesOfStep
from megatron_lancet.lab.causes.watch import CauseWatch, gathered_causes
from megatron_lancet.training.run import OverlappedRun, Run

KEY = "exposed_by_cause"
"""In ``report.json``."""


@dataclass(frozen=True)
class CausesFlags(CheckedFlags):
    """The steps that are traced for causes."""

    diagnose_interval: int = flag(
        0,
        parsed_as=int,
        at_least=0,
        metavar="N",
        advice="To trace no step pass 0, or drop the flag.",
        unchecked="",
        help="every N steps trace one and say why ranks waited in it: wire, uneven rows, a late or slow rank, token "
        "counts, host. In TensorBoard under lancet/exposed_by_cause, in report.json, and in a line of the log when a "
        "share changes for good. 0 (default): only the step that --lancet-report traces.",
    )


class Causes(Feature):
    """Why ranks waited in a step."""

    name = "causes"
    flags = CausesFlags

    def check(self, facts: RunFacts) -> None:
        """Refuses to trace stock modules."""
        interval = facts.config.of(CausesFlags).diagnose_interval
        if interval and facts.plan is None:
            raise UsageError(
                f"--lancet-diagnose-interval {interval} traces the overlapping block, but this run has stock Megatron "
                "modules. Drop it, or pass a plan and --expert-model-parallel-size of at least 2."
            )

    def start(self, run: Run) -> "ActiveCauses | None":
        """Watches a run of the overlapping block, if it asks for that."""
        if not isinstance(run, OverlappedRun):
            return None
        interval = run.config.of(CausesFlags).diagnose_interval
        if not interval or run.steering.writes_only:
            return ActiveCauses(run, None)

        def is_report_due() -> bool:
            return run.traced is not None and run.traced.is_due()

        watch = CauseWatch(run.setup, run.recorder, run.device, run.is_settled, interval, is_report_due)
        return ActiveCauses(run, watch)


class ActiveCauses(ActiveFeature):
    """The causes of a run's traced steps.

    Args:
        watch: traces a step in each interval; None where the run asks for none.
    """

    def __init__(self, run: OverlappedRun, watch: CauseWatch | None) -> None:
        self._run = run
        self._watch = watch

    def observe(self, step: Callable[[], Any]) -> Any:
        """Runs a training step, and traces it if it is one of an interval."""
        return step() if self._watch is None else self._watch.observe(step)

    def summary(self) -> Mapping[str, Any]:
        """Causes of traced steps, the newest last. Collective over all ranks."""
        found = [] if self._watch is None else list(self._watch.found)
        traced = self._run.traced
        if not found and traced is not None and traced.last is not None:
            own = traced_rank(traced.last, self._run.device)
            found = [gathered_causes(self._run.setup, self._run.device, traced.iteration, own)]
        return {KEY: to_plain(found)} if found else {}

    def lines(self, report: Mapping[str, Any]) -> Sequence[str]:
        """The table of the newest step."""
        if KEY not in report:
            return ()
        return from_plain(CausesOfStep, report[KEY][-1], f"{REPORT_FILE}.{KEY}").as_text().splitlines()


CAUSES = Causes()
