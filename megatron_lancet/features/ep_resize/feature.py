"""Resuming from a checkpoint with another expert-parallel size, and the cases in which that is refused.

Megatron keeps the optimizer state of experts apart from the state of dense weights where the experts are spread over
several ranks, but not where one rank has all of them: a checkpoint fits only runs of the same kind. With
``--lancet-separate-expert-grads`` a run with size 1 keeps them apart as well: the experts' gradients get buckets and an
optimizer of their own. The sums are the same, over the same ranks.
"""

import argparse
import functools
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature, Feature, RunFacts
from megatron_lancet.flags import CheckedFlags, flag
from megatron_lancet.training.megatron import checkpoint_patches
from megatron_lancet.training.run import Run, StockRun

_FLAG = "--lancet-separate-expert-grads"


@dataclass(frozen=True)
class EpResizeFlags(CheckedFlags):
    """Whether experts have gradients and an optimizer of their own."""

    separate_expert_grads: bool = flag(
        False,
        parsed_as=bool,
        not_with_spec=": other scripts do not note it in checkpoints. Drop it.",
        help="with --expert-model-parallel-size 1, keep experts' gradients and optimizer state apart from dense "
        "weights', as with larger sizes: a run may then go on from a checkpoint with the other size, and back.",
    )


class EpResize(Feature):
    """``--lancet-separate-expert-grads``."""

    name = "ep_resize"
    flags = EpResizeFlags

    def check_arguments(self, args: argparse.Namespace, config: LancetConfig) -> None:
        """Refuses a flag without effect."""
        check_separate_expert_grads(args)

    def enter(self, facts: RunFacts, stack: ExitStack) -> None:
        """Checks the checkpoint that Megatron loads."""
        check = functools.partial(check_checkpoint, facts.args)
        stack.enter_context(checkpoint_patches.arguments_before_loading(check))

    def start(self, run: Run) -> "SeparateExpertGrads | None":
        """Keeps the experts of a run apart."""
        is_asked = run.config.of(EpResizeFlags).separate_expert_grads
        return SeparateExpertGrads() if is_asked and isinstance(run, StockRun) else None


class SeparateExpertGrads(ActiveFeature):
    """A run of stock modules whose experts have gradients of their own."""

    def prepare_stock(self, stages: Sequence[Any]) -> None:
        """Marks the experts' weights."""
        separate_expert_grads(stages)


def check_separate_expert_grads(args: argparse.Namespace) -> None:
    """Raise a UsageError if the flag is given, but has no effect in this run."""
    if args.lancet_separate_expert_grads and (not args.num_experts or args.expert_model_parallel_size > 1):
        found = f"this run has size {args.expert_model_parallel_size}" if args.num_experts else "this model has none"
        raise UsageError(f"{_FLAG} keeps experts apart where --expert-model-parallel-size is 1; {found}. Drop it.")


def separate_expert_grads(stages: Iterable[nn.Module]) -> None:
    """Mark the experts' weights as Megatron does with a larger size. To be called before DDP wraps the stages."""
    for stage in stages:
        for layer in stage.modules():
            if isinstance(layer, MoELayer):
                for weight in layer.experts.parameters():
                    weight.allreduce = False


def check_checkpoint(args: argparse.Namespace, saved: Any) -> None:
    """Refuse a checkpoint whose optimizer state can't be loaded with this run's expert-parallel size.

    Args:
        args: Megatron's arguments of this run.
        saved: arguments of the run that saved the checkpoint.

    Raises:
        UsageError: the sizes don't fit; names the flag to pass.
    """
    if not args.num_experts or args.no_load_optim or args.finetune or getattr(saved, "no_save_optim", False):
        return
    before, now = getattr(saved, "expert_model_parallel_size", 1), args.expert_model_parallel_size
    was_apart = before > 1 or getattr(saved, "lancet_separate_expert_grads", False)
    is_apart = now > 1 or args.lancet_separate_expert_grads
    sizes = f"the checkpoint was saved with --expert-model-parallel-size {before}, this run has {now}"
    if was_apart and not is_apart:
        raise UsageError(f"{sizes}: pass {_FLAG} too, or the optimizer's state can't be loaded.")
    if is_apart and not was_apart:
        raise UsageError(
            f"{sizes}, and it does not keep the experts' optimizer state apart. Save it again with {_FLAG} from a run "
            "that has loaded it with --no-load-optim, or pass --no-load-optim here; moments start anew in both cases."
        )
    is_cut = saved.use_distributed_optimizer and not getattr(saved, "dist_ckpt_optim_fully_reshardable", False)
    if before != now and is_cut:
        raise UsageError(
            f"{sizes}, and its distributed optimizer state is sharded by rank. Save it with "
            "--dist-ckpt-optim-fully-reshardable."
        )


EP_RESIZE = EpResize()
