"""pretrain_gpt_moe.py whose planner and clock are scripted; training is the real one.

LANCET_TEST_TUNING is a JSON object: ``profiled``, plans that run for the profile; ``plans``, the planner's answers,
each a list of plans; ``slow_s``, by plan, by how much its steps take longer; ``exposed_from``, the step from which half
a second of waiting is on every step's account.
"""

import json
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_lancet.features.tuning import controller
from megatron_lancet.patching import around, replaced
from megatron_lancet.schedule.plan import ChunkDim, Plan, fixed_plan, plan_without_overlap
from megatron_lancet.training.pretrain import main
from tests.ranks.pretrain_worker import recording


def plan_of(text: str) -> Plan:
    """``2``: two chunks along the batch; ``2s``: along the sequence; ``none``: without overlap; ``fused``: that with
    torch's attention kernel.
    """
    if text in ("none", "fused"):
        return replace(plan_without_overlap(), fused_attention=text == "fused")
    dim = ChunkDim.SEQUENCE if text.endswith("s") else ChunkDim.BATCH
    return fixed_plan(int(text.rstrip("s")), chunk_dim=dim)


class ScriptedMaker:
    profile = None

    def __init__(self, args: Any, *_: Any) -> None:
        self._args = args
        self._script = json.loads(os.environ["LANCET_TEST_TUNING"])
        self._answers = list(self._script["plans"])
        self._left: list[str] = []
        self.num_begun = 0

    def made_for(self) -> dict[str, str]:
        return {"seq_length": str(self._args.seq_length), "micro_batch_size": str(self._args.micro_batch_size)}

    def num_steps(self) -> int:
        return len(self._script["profiled"])

    def begin(self, again: bool) -> None:
        assert again == (self.num_begun > 0)
        self.num_begun += 1
        self._left = list(self._script["profiled"])

    def next_plan(self) -> Plan | None:
        return plan_of(self._left.pop(0)) if self._left else None

    def run_step(self, step):
        return step()

    def num_micro_batches(self) -> int:
        return 1

    def make(self):
        from megatron_lancet.features.tuning.controller import Planned
        from megatron_lancet.features.tuning.race import Candidate
        from megatron_lancet.planning.estimate import StepEstimate

        answer = self._answers.pop(0)
        finalists = tuple(Candidate(plan_of(text), prediction=StepEstimate(50.0, 1.0)) for text in answer)
        return Planned(finalists, kernel=Candidate(plan_of("fused"), "fused"), why="scripted")


def clock(slow_s: dict[str, float], exposed_from: int, setups: list[Any]):
    """A step takes a second and what its plan adds; nothing waits before the given step."""
    added_s = {plan_of(text): seconds for text, seconds in slow_s.items()}
    num_steps = 0

    def observed(observe, self, run):
        nonlocal num_steps
        plan = setups[0].plan
        result = observe(self, run)
        num_steps += 1
        record = self.records[-1]
        record.comm.exposed_ms, record.comm.counts_exposed_ms = 500.0 * (num_steps >= exposed_from), 0.0
        self.records[-1] = replace(record, step_ms=1e3 * (1 + added_s.get(plan, 0.0)))
        return result

    return observed


def run() -> None:
    from megatron.training import training

    from megatron_lancet.features.tuning import feature
    from megatron_lancet.training.observe.step_recorder import StepRecorder
    from megatron_lancet.training.overlap_setup import OverlapSetup

    script = json.loads(os.environ["LANCET_TEST_TUNING"])
    losses: list[dict[str, float]] = []
    classes: set[str] = set()
    setups: list[Any] = []
    plans: list[str] = []

    def registered(init, self, *args, **kwargs):
        setups.append(self)
        init(self, *args, **kwargs)

    def noted(observe, self, step):
        plan = setups[0].plan
        plans.append(f"{plan.segments[0]}{' fused' if plan.fused_attention else ''}")
        return observe(self, step)

    with ExitStack() as stack:
        stack.enter_context(around(training, "train_step", recording(losses, classes)))
        stack.enter_context(around(OverlapSetup, "__init__", registered))
        scripted = clock(script.get("slow_s", {}), script.get("exposed_from", 10**9), setups)
        stack.enter_context(around(StepRecorder, "observe", scripted))
        stack.enter_context(around(StepRecorder, "observe", noted))
        stack.enter_context(replaced(controller, "MIN_STEPS_BETWEEN_PLANS", 0))
        stack.enter_context(replaced(feature, "ProfilingPlanMaker", ScriptedMaker))
        main()
    if os.environ["RANK"] == "1":
        result = {"losses": losses, "model_modules": sorted(classes), "plans": plans}
        Path(os.environ["LANCET_TEST_RESULT"]).write_text(json.dumps(result))


if __name__ == "__main__":
    run()
