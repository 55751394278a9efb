"""A run with or without the overlap: its setup, the hooks around Megatron's training steps, and its report."""

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch

from megatron_lancet.config import LancetConfig
from megatron_lancet.feature import ActiveFeature, RunFacts
from megatron_lancet.planning.load.placement import Placement
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.reductions import MicroOps
from megatron_lancet.schedule.wire import Wire
from megatron_lancet.training.load.placement import apply_placement, check_reshardable, choose_placement, placement_note
from megatron_lancet.training.load.rebalance import Rebalancer, check_can_rebalance
from megatron_lancet.training.load.received_rows import ReceivedRows, check_row_limit
from megatron_lancet.training.megatron import checkpoint_patches, patches
from megatron_lancet.training.megatron.grad_reduction import reductions_in_micro_ops
from megatron_lancet.training.megatron.paired_schedules import paired_schedules
from megatron_lancet.training.megatron.patches import StepHook
from megatron_lancet.training.megatron.te_seams import check_te_seams
from megatron_lancet.training.observe.run_report import report_overlap
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.observe.traced_steps import TracedSteps
from megatron_lancet.training.overlap_setup import NoOverlap, OverlapSetup
from megatron_lancet.training.plan.attention import uses_sdpa
from megatron_lancet.training.plan.comm_priority import choose_micro_ops
from megatron_lancet.training.plan.dispatch import nodes_of, nodes_to_connect
from megatron_lancet.training.plan.select import choose_plan, is_tuned
from megatron_lancet.training.plan.support import TRANSFORMER_ENGINE
from megatron_lancet.training.plan.wire import choose_wire, wire_note
from megatron_lancet.training.tuning.announcement import announced_plan
from megatron_lancet.training.tuning.autotune import AutoTune
from megatron_lancet.training.tuning.controller import TuningController, plan_without_overlap
from megatron_lancet.training.tuning.plan_maker import ProfilingPlanMaker
from megatron_lancet.training.tuning.profile_to_file import ProfileToFile


@dataclass(frozen=True)
class RunChoice:
    """How a run trains; the same on all ranks.

    Attributes:
        args: Megatron's validated arguments.
        plan: the fixed plan, or the fallback of a tuned run that is too short to find one; None for stock modules.
        line: the plan and its source, for the user.
        micro_ops: cut of the gradient reductions, if all-to-alls go first; None where Megatron runs the reductions.
        wire: number format of hidden states in messages.
        nodes: those between which two hops are possible; None if no plan of the run can have them.
        placements: where experts are, by layer; None where Megatron places them.
    """

    args: argparse.Namespace
    config: LancetConfig
    plan: Plan | None
    line: str
    micro_ops: MicroOps | None
    wire: Wire
    nodes: Nodes | None
    placements: Mapping[int, Placement] | None = None

    @property
    def is_tuned(self) -> bool:
        """Whether the run finds its plan while it trains."""
        return self.facts.is_tuned

    @property
    def facts(self) -> RunFacts:
        """What features may ask."""
        return run_facts(self.args, self.config, self.plan)


def choose_run(args: argparse.Namespace, config: LancetConfig) -> RunChoice:
    """Choose the plan of a run.

    Raises:
        UsageError: the user asks for something that the run does not allow.
    """
    plan, line = choose_plan(args, config)
    line = announced_plan(args, config, plan, line)
    wire = choose_wire(args, config, plan)
    nodes = None
    if plan is not None:
        may_change = config.profile is not None or is_tuned(args, config)
        nodes = nodes_to_connect(args, config, plan, may_change)
    micro_ops = choose_micro_ops(args, config, plan)
    check_can_rebalance(args, config, plan)
    placements = choose_placement(args, config, plan)
    check_row_limit(args, config, plan)
    facts = run_facts(args, config, plan)
    check_features(facts)
    line = f"{line}{wire_note(wire)}{notes_of_features(facts)}{placement_note(placements)}"
    return RunChoice(args, config, plan, line, micro_ops, wire, nodes, placements)


def run_facts(args: argparse.Namespace, config: LancetConfig, plan: Plan | None) -> RunFacts:
    """What features may ask of a run with this plan."""
    return RunFacts(args, config, plan, plan is not None and is_tuned(args, config))


def check_features(facts: RunFacts) -> None:
    """Checks all features of a run.

    Raises:
        UsageError: the run does not allow what the user asks for.
    """
    for feature in facts.config.features:
        feature.check(facts)


def notes_of_features(facts: RunFacts) -> str:
    """What the line on the plan says of features."""
    return "".join(feature.note(facts) for feature in facts.config.features)


def enter_run(stack: ExitStack, choice: RunChoice, device: torch.device) -> "StockRun | OverlappedRun":
    """Change Megatron for the length of ``stack``, before it builds its model.

    Returns:
        The run. The caller makes its ``setup`` a hook of Megatron's model builder, and calls its ``report`` at the
        end; both are collective over all ranks.

    Raises:
        UsageError: the user asks for something that the run does not allow.
    """
    if choice.plan is not None and choice.args.transformer_impl == TRANSFORMER_ENGINE:
        check_te_seams()
    stack.enter_context(patches.sequence_parallel_with_torch_norm())
    stack.enter_context(patches.core_attention_without_te(uses_sdpa(choice.args, choice.config)))
    stack.enter_context(patches.resumable_distributed_optimizer())
    run = StockRun(choice, device) if choice.plan is None else OverlappedRun(choice, choice.plan, device)
    run.enter(stack)
    return run


class Run:
    """What both kinds of runs have.

    Attributes:
        config: the settings of the run.
        device: device of this rank.
        stats: times and counts its all-to-alls.
        recorder: times the steps.
    """

    def __init__(self, choice: RunChoice, device: torch.device) -> None:
        self.facts, self.config, self.device = choice.facts, choice.config, device
        self.stats = CommStats(device)
        self._features: list[ActiveFeature] = []
        self.recorder = StepRecorder(choice.args, device, self.stats, choice.config.tune_steps, self._features)

    def _start_features(self) -> None:
        """Lets features join the run, which must be complete otherwise."""
        started = (feature.start(self) for feature in self.config.features)
        self._features += [feature for feature in started if feature is not None]


class StockRun(Run):
    """A run of stock modules, whose steps and all-to-alls are timed. ``setup`` is a hook for Megatron's builder."""

    def __init__(self, choice: RunChoice, device: torch.device) -> None:
        super().__init__(choice, device)
        self.setup = NoOverlap(choice.config.experts_apart)
        self._start_features()

    def enter(self, stack: ExitStack) -> None:
        """Change Megatron for the length of ``stack``."""
        stack.enter_context(patches.measured_stock_communication(self.stats))
        for feature in self._features:
            feature.enter(stack)
        hooks = [feature.observe for feature in self._features]
        stack.enter_context(patches.train_step_hooks([*hooks, self.recorder.observe]))

    def report(self) -> None:
        """Print and write the closing report. Collective over all ranks."""
        self.recorder.report(None, self.config.report_dir)


class OverlappedRun(Run):
    """A run of the overlapping block: under a fixed plan, while it is profiled, or while it finds its plan.

    ``setup`` is a hook for Megatron's model builder. The constructor raises a UsageError if the user asks for something
    that the run does not allow.

    Attributes:
        setup: the hook.
        traced: traces steps for the report; None without ``--lancet-report``.
        is_settled: returns whether the run has its final plan; the same on all ranks.
        makes_profile: whether the run only writes a profile.
    """

    def __init__(self, choice: RunChoice, plan: Plan, device: torch.device) -> None:
        super().__init__(choice, device)
        args, config = choice.args, choice.config
        self._choice = choice
        self._maker: ProfilingPlanMaker | None = None
        self._tuner: AutoTune | None = None
        self.traced: TracedSteps | None = None
        self._received_rows: ReceivedRows | None = None
        profiles = self.makes_profile = config.profile is not None
        layout = nodes_of(args, config)
        self.setup = OverlapSetup(
            plan_without_overlap() if choice.is_tuned else plan,
            device,
            self.stats,
            timedelta(minutes=args.distributed_timeout_minutes),
            sdpa=uses_sdpa(args, config),
            switchable=profiles or choice.is_tuned,
            micro_ops=choice.micro_ops,
            wire=choice.wire,
            nodes=choice.nodes,
            layout=layout if isinstance(layout, Nodes) else None,
            prepared=None if choice.placements is None else partial(apply_placement, placements=choice.placements),
            max_expert_rows=config.max_received_rows if isinstance(config.max_received_rows, int) else None,
            documents=args.dataloader_inter_document_masking,
            features=self._features,
        )
        self._profile = ProfileToFile(args, config, self.setup, device) if profiles else None
        if choice.is_tuned:
            controller = TuningController(config.tune_steps)
            self._maker = ProfilingPlanMaker(args, config, self.setup, device, controller.note)
            self._tuner = AutoTune(args, controller, self.setup, self.recorder, self._maker, plan, device)
        is_settled = self.is_settled = self._tuner.is_settled if self._tuner is not None else lambda: True
        if config.max_received_rows is not None:
            self._received_rows = ReceivedRows(args, config, self.setup, self.recorder, device, is_settled)
        if config.report_dir is not None and not profiles:
            self.traced = TracedSteps(self.setup, self.recorder, device, is_settled)
        self._rebalancer: Rebalancer | None = None
        if config.rebalance_interval is not None:
            nodes = layout if isinstance(layout, Nodes) else None
            self._rebalancer = Rebalancer(args, config.rebalance_interval, self.setup, self.recorder, is_settled, nodes)
        self._start_features()

    def enter(self, stack: ExitStack) -> None:
        """Change Megatron for the length of ``stack``."""
        stack.enter_context(patches.dropped_outputs())
        stack.enter_context(patches.predictions_in_documents())
        stack.enter_context(paired_schedules(lambda: self.setup.stages))
        if self.setup.scheduler is not None:
            stack.enter_context(reductions_in_micro_ops(self.setup.scheduler))
        if self._tuner is not None:
            stack.enter_context(checkpoint_patches.checkpoint_arguments(self._tuner.take_from_checkpoint))
        if self._choice.placements is not None:
            check = partial(check_reshardable, self._choice.args)
            stack.enter_context(checkpoint_patches.arguments_before_loading(check))
        if self._rebalancer is not None:
            stack.enter_context(patches.optimizer_of_steps(self._rebalancer.take_optimizer))
        for feature in self._features:
            feature.enter(stack)
        stack.enter_context(patches.train_step_hooks(self._step_hooks()))

    def _step_hooks(self) -> list[StepHook]:
        """The hooks around each training step, the outermost first.

        The tuner and the profile are outermost: they choose the step's plan before it begins, and read the others'
        records after it. The recorder is innermost: it times Megatron's step and none of the work around it.
        """
        parts = self._tuner, self._profile, self._received_rows, self.traced, *self._features, self._rebalancer
        choosing = [part.observe for part in parts if part is not None]
        return [*choosing, self.setup.check_step, self.recorder.observe]

    def report(self) -> None:
        """Print and write the closing report, unless the run made a profile. Collective over all ranks."""
        if self._profile is None:
            found = self.traced, self._tuner, self._maker, self._features
            report_overlap(self.recorder, self.setup, self.config.report_dir, *found)
