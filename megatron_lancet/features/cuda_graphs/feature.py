"""``--lancet-cuda-graphs``: replays attention and routing from CUDA graphs."""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from megatron.core.tensor_parallel import random as tensor_parallel_random

from megatron_lancet.config import OWN_SPEC, LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature, Feature, RunFacts
from megatron_lancet.feature_parts import SmallLaunch
from megatron_lancet.features.cuda_graphs.limits import blockers, clear_megatrons_flags, megatrons_scopes
from megatron_lancet.features.cuda_graphs.stage import StageGraphs, is_captured
from megatron_lancet.flags import CheckedFlags, flag, words
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.plan.attention import drop_masks
from megatron_lancet.training.plan.support import TRANSFORMER_ENGINE, may_overlap
from megatron_lancet.training.process.console import say

FLAG = "--lancet-cuda-graphs"
KEY = "cuda_graphs"
"""In ``report.json``."""
_ASKED = "lancet_asked_for_cuda_graphs"
"""Among Megatron's arguments: its own flags have asked for graphs, before the mapping clears them."""


class GraphChoice(StrEnum):
    """What is captured."""

    OFF = "off"
    """Nothing."""
    ATTENTION = "attention"
    """Attention and routing of layers in one chunk, or in chunks of samples."""


@dataclass(frozen=True)
class CudaGraphFlags(CheckedFlags):
    """What is captured."""

    cuda_graphs: GraphChoice = flag(
        GraphChoice.OFF,
        same_on_all_ranks=True,
        **words(GraphChoice),
        unmodelled="graphs are captured while training",
        unchecked="captured CUDA graphs, which need a GPU",
        help="attention: capture norms, attention and router of each layer with experts in CUDA graphs, after "
        "--cuda-graph-warmup-steps steps under the final plan, so that the host launches less; not in chunks of a "
        "sequence. Megatron's --cuda-graph-impl with --cuda-graph-modules attn moe_router asks for the same. off "
        "(default): no graphs.",
    )


class CudaGraphs(Feature):
    """``--lancet-cuda-graphs``."""

    name = "cuda_graphs"
    flags = CudaGraphFlags

    def needs_plan(self, config: LancetConfig) -> bool:
        """Whether the user asks for graphs of the overlapping block."""
        return config.of(CudaGraphFlags).cuda_graphs is not GraphChoice.OFF

    def missing_seams(self) -> Iterator[str]:
        """The tracker of random states, which does nothing in a capture."""
        if not hasattr(tensor_parallel_random.CudaRNGStatesTracker, "fork"):
            yield "megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork"

    def normalize(self, args: argparse.Namespace, config: LancetConfig) -> Iterator[str]:
        """Maps Megatron's own flags; yields a line for each change."""
        scopes = megatrons_scopes(args)
        if scopes:
            mapped = argparse.Namespace(**vars(args))
            clear_megatrons_flags(mapped)
            if may_overlap(mapped, config) and not any(blockers(mapped, config)):
                yield f"--cuda-graph-impl {args.cuda_graph_impl} with {' '.join(scopes)} runs as {FLAG} attention"
                clear_megatrons_flags(args)
                setattr(args, _ASKED, True)
        if not self.is_asked(args, config):
            return
        yield from drop_masks(args)
        if args.transformer_impl == TRANSFORMER_ENGINE and not args.te_rng_tracker:
            args.te_rng_tracker = True
            yield "--te-rng-tracker is on, as Megatron needs it for CUDA graphs"

    def is_asked(self, args: argparse.Namespace, config: LancetConfig) -> bool:
        """Whether the user asks for graphs, by either flag."""
        return self.needs_plan(config) or getattr(args, _ASKED, False)

    def check(self, facts: RunFacts) -> None:
        """Refuses a run in which nothing can be captured."""
        if not self.is_asked(facts.args, facts.config):
            return
        if facts.plan is None:
            raise UsageError(
                f"{FLAG} captures the overlapping block, but this run has stock Megatron modules. Drop it, or pass "
                "--cuda-graph-impl for Megatron's own graphs."
            )
        if facts.device is not None and facts.device.type != "cuda":
            raise UsageError(f"{FLAG} needs a GPU, and this machine has none. Drop the flag.")
        for blocker in blockers(facts.args, facts.config):
            raise UsageError(f"{FLAG} does not work with {blocker}. Drop one of the two.")
        for needed in _missing_in_own_script(facts.args):
            raise UsageError(f"{FLAG} in Megatron's own script needs {needed}. Pass it too.")
        if not facts.plan_changes and not facts.plan.delays_weight_grads:
            raise UsageError(
                f"{FLAG} needs the store of deferred weight gradients, and the plan defers none (dw=none). Pass "
                "--lancet-dw-policy fill, or drop the flag."
            )
        if not facts.plan_changes and not _captures_any(facts.plan):
            raise UsageError(
                f"{FLAG} captures attention over whole sequences, and the plan cuts sequences in all layers. Pass "
                "--lancet-chunk-dim batch or --lancet-num-chunks 1, or drop the flag."
            )

    def shrink(self, launch: SmallLaunch) -> None:
        """Leaves graphs out of a check on CPU ranks."""
        launch.left_out["CUDA graphs"] = "--cuda-graph --enable-cuda-graph --external-cuda-graph"

    def note(self, facts: RunFacts) -> str:
        """Says what is captured."""
        is_on = facts.plan is not None and self.is_asked(facts.args, facts.config)
        return "; attention and routing are captured in CUDA graphs" if is_on else ""

    def start(self, run: Any) -> ActiveFeature | None:
        """Captures the run's layers."""
        if not self.is_asked(run.facts.args, run.config):
            return None
        return ActiveGraphs(
            run.setup, run.is_settled, run.facts.args.cuda_graph_warmup_steps, run.steering.step_changed
        )


class ActiveGraphs(ActiveFeature):
    """Captures graphs between two steps, and drops them when the plan changes."""

    def __init__(
        self,
        setup: Any,
        is_settled: Callable[[], bool],
        num_warmup_steps: int,
        step_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            setup: :class:`~megatron_lancet.training.overlap_setup.OverlapSetup`.
            is_settled: whether the run has its final plan.
            num_warmup_steps: eager steps under the final plan before the capture; at least one.
            step_changed: called after each capture: a step takes less time from then on.
        """
        self.stages: Sequence[StageGraphs] = ()
        self._setup, self._is_settled, self._step_changed = setup, is_settled, step_changed
        self._num_eager_steps = max(1, num_warmup_steps)
        self._num_steps = 0
        self._capture_s = 0.0

    def observe(self, step: Callable[[], Any]) -> Any:
        """Captures before the first step after the warm-up."""
        if not self._is_settled():
            return step()
        if not self.stages or not all(stage.is_installed for stage in self.stages):
            self.stages = [StageGraphs(stage.decoder) for stage in self._setup.stages]
            self._num_steps = 0
        elif self._num_steps == self._num_eager_steps:
            self._capture()
            self._step_changed()
        for stage in self.stages:
            stage.begin_step()
        self._num_steps += 1
        return step()

    def is_steady(self) -> bool:
        """Whether the graphs are captured."""
        return self._num_steps > self._num_eager_steps

    def _capture(self) -> None:
        torch.cuda.empty_cache()  # as each capture does
        before, start_s = torch.cuda.memory_reserved(), time.perf_counter()
        try:
            for stage in self.stages:
                stage.capture()
        except RuntimeError as error:
            raise UsageError(
                f"a CUDA graph of attention and routing can't be captured: {error}. Drop {FLAG}."
            ) from error
        self._capture_s = time.perf_counter() - start_s
        taken_mb = (torch.cuda.memory_reserved() - before) / 1e6
        num_graphs = sum(stage.num_graphs for stage in self.stages)
        say(f"Megatron-Lancet: captured {num_graphs} CUDA graphs in {self._capture_s:.1f} s, {taken_mb:.0f} MB")

    def summary(self) -> Mapping[str, Any]:
        """Graphs, and how many micro-batches of rank 0 they ran."""
        return {
            KEY: {
                "num_graphs": sum(stage.num_graphs for stage in self.stages),
                "capture_s": self._capture_s,
                "num_replayed_micro_batches": sum(stage.num_replayed for stage in self.stages),
                "num_eager_micro_batches": sum(stage.num_eager for stage in self.stages),
            }
        }

    def lines(self, report: Mapping[str, Any]) -> Sequence[str]:
        """One line: what was replayed."""
        found = report[KEY]
        if not found["num_graphs"]:
            return [
                "CUDA graphs: none were captured, since no layer ran uncut, or in chunks of samples, and without "
                "a mask, for long enough"
            ]
        replayed, eager = found["num_replayed_micro_batches"], found["num_eager_micro_batches"]
        of_all = f"{replayed} of {replayed + eager} later micro-batches replayed"
        return [f"CUDA graphs: {found['num_graphs']} captured; {of_all}"]


def _missing_in_own_script(args: argparse.Namespace) -> Iterator[str]:
    """Yields the flags that :meth:`CudaGraphs.normalize` sets, and can't where Megatron has read them already."""
    if args.spec is None or tuple(args.spec) != OWN_SPEC:
        return
    if args.create_attention_mask_in_dataloader:
        yield "--no-create-attention-mask-in-dataloader"
    if args.transformer_impl == TRANSFORMER_ENGINE and not args.te_rng_tracker:
        yield "--te-rng-tracker"


def _captures_any(plan: Plan) -> bool:
    return any(is_captured(segment) for one in (plan, plan.at_ends) for segment in one.segments)


CUDA_GRAPHS = CudaGraphs()
