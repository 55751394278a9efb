"""``--lancet-shortcut-moe``: whether a run can have the wiring, and the plans that it allows."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature, Feature, RunFacts
from megatron_lancet.feature_parts import PlanBlocker, PlanPart
from megatron_lancet.features.shortcut.model import check_plan, wire
from megatron_lancet.features.shortcut.order import NAME
from megatron_lancet.features.shortcut.support import PATTERN, layers_blocker
from megatron_lancet.flags import CheckedFlags, flag
from megatron_lancet.planning.search.search_space import Limits, of_wiring
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.plan import DwPolicy, Plan
from megatron_lancet.training.layer_pattern import layer_kinds
from megatron_lancet.training.megatron import checkpoint_patches
from megatron_lancet.training.megatron.seams import missing_functions
from megatron_lancet.training.plan.support import OWN_DISPATCHER
from megatron_lancet.training.run import Run

FLAG, IDENTITY = "--lancet-shortcut-moe", "--lancet-identity-experts"
_ONLY_OWN_SCRIPT = ": its checkpoints are of another model, which only that script tells apart."
_KEEPS_ALL_ROWS = {
    "moe_expert_capacity_factor": "--moe-expert-capacity-factor",
    "moe_router_num_groups": "--moe-router-num-groups",
    "moe_router_enable_expert_bias": "--moe-router-enable-expert-bias",
    "moe_router_force_load_balancing": "--moe-router-force-load-balancing",
}
"""Arguments, and their flags, that a router with identity experts was not compared with."""
_BALANCING = ("none", "aux_loss", "seq_aux_loss")
_REFUSED = {
    "mtp_num_layers": "--mtp-num-layers",
    "fp32_residual_connection": "--fp32-residual-connection",
    "moe_shared_expert_overlap": "--moe-shared-expert-overlap",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "spec": "--spec",
}
"""Arguments, and their flags, with which the wiring was not compared or has no meaning."""


@dataclass(frozen=True)
class ShortcutFlags(CheckedFlags):
    """Whether routed sums are added one layer later, and to what else tokens may go."""

    shortcut_moe: bool = flag(
        False,
        parsed_as=bool,
        same_on_all_ranks=True,
        unmodelled="it adds the routed sum in its own layer",
        not_with_spec=_ONLY_OWN_SCRIPT,
        help="with MoE and dense layers in turn, add the sum of the routed experts behind the dense layer (LongCat-"
        "Flash, ScMoE), so that all-to-alls are hidden with one chunk. It is another model with stock's parameters.",
    )
    identity_experts: int = flag(
        0,
        parsed_as=int,
        at_least=0,
        metavar="Z",
        advice="0 is none.",
        same_on_all_ranks=True,
        unmodelled="it takes all chosen experts' rows for sent",
        not_with_spec=_ONLY_OWN_SCRIPT,
        help=f"with {FLAG}, Z more experts per layer that return their token and are not sent; a router has rows for "
        "them (default: 0).",
    )


class ShortcutFeature(Feature):
    """``--lancet-shortcut-moe``."""

    name = "shortcut"
    flags = ShortcutFlags

    def missing_seams(self) -> Iterator[str]:
        """Yields the methods of Megatron that the wiring splits, and this Megatron lacks."""
        yield from missing_functions(
            [
                (MoELayer, OpKind.POSTPROCESS, ("output", "shared_expert_output")),
                (TransformerLayer, "_forward_post_mlp", ("mlp_output_with_bias", "residual")),
            ]
        )

    def check_layers(self, args: argparse.Namespace, config: LancetConfig) -> None:
        """Refuses models that the wiring is not for."""
        number = config.of(ShortcutFlags).identity_experts
        if is_on(config):
            check_model(args, config)
            if number:
                check_routers(args, number)
        elif number:
            raise UsageError(f"{IDENTITY} {number} needs {FLAG}. Pass it too, or drop it.")

    def prepare_built(self, args: argparse.Namespace, model: Any) -> None:
        """Wires a model that is evaluated."""
        if getattr(args, "lancet_shortcut_moe", False):
            wire([model], getattr(args, "lancet_identity_experts", 0))

    def check(self, facts: RunFacts) -> None:
        """Refuses plans that part a layer from the next one."""
        if not is_on(facts.config):
            return
        if facts.plan is not None:
            check_plan(facts.plan)
        elif "layernorm" in (facts.args.recompute_modules or ()):
            raise UsageError(
                f"{FLAG} with stock modules does not work with --recompute-modules layernorm, which waits for one sum "
                "of a layer. Drop one of them, or let a plan run the layers."
            )

    def plan_blockers(self, part: PlanPart, args: argparse.Namespace, config: LancetConfig) -> Iterator[PlanBlocker]:
        """Yields why there are no tiles."""
        if part is PlanPart.TILES and is_on(config):
            yield PlanBlocker(f"{FLAG} runs the next layer while rows are under way in one message", f"drop {FLAG}")
        if part is PlanPart.CUDA_GRAPHS and is_on(config):
            yield PlanBlocker(f"{FLAG} (experts start between attention and the router)", f"drop {FLAG}")

    def limited(self, limits: Limits, args: argparse.Namespace, config: LancetConfig) -> Limits:
        """Leaves the plans that keep layers together."""
        return of_wiring(limits) if is_on(config) else limits

    def in_fixed_plan(self, plan: Plan, args: argparse.Namespace, config: LancetConfig) -> tuple[Plan, Sequence[str]]:
        """Cuts no micro-batch unless the user asks for it: one chunk hides messages already."""
        if not is_on(config) or config.num_chunks is not None or plan.num_chunks == 1:
            return plan, ()
        (whole,) = plan.segments
        segment = replace(whole, num_chunks=1, chunk_multiple=1)
        window = segment.all_to_alls_per_layer(plan.dispatch) if plan.dw_policy is DwPolicy.FILL else 0
        return replace(plan, segments=(segment,), dw_window=window), ()

    def layout_blockers(self, args: argparse.Namespace) -> Iterator[str]:
        """Yields the flag: a check builds other layers than MoE and dense ones in turn."""
        if args.lancet_shortcut_moe:
            yield FLAG

    def note(self, facts: RunFacts) -> str:
        """Says that it is another model."""
        return "; routed sums are added one layer later: another model than stock's" if is_on(facts.config) else ""

    def enter(self, facts: RunFacts, stack: ExitStack) -> None:
        """Checks the checkpoint that Megatron loads."""
        check = partial(check_checkpoint, facts.args)
        stack.enter_context(checkpoint_patches.arguments_before_loading(check))

    def start(self, run: Run) -> "ActiveShortcut | None":
        """Wires the run's layers."""
        return ActiveShortcut(run.config.of(ShortcutFlags).identity_experts) if is_on(run.config) else None


class ActiveShortcut(ActiveFeature):
    """The wiring in a run.

    Args:
        num_identity_experts: of each router.
    """

    def __init__(self, num_identity_experts: int = 0) -> None:
        self._num_identity_experts = num_identity_experts

    def model_settings(self) -> Mapping[str, Any]:
        """The order of ops."""
        return {"wiring": NAME}

    def prepare_stock(self, stages: Sequence[Any]) -> None:
        """Wires Megatron's own modules."""
        wire(stages, self._num_identity_experts)

    def adopt(self, stages: Sequence[Any], comm: Any) -> None:
        """Wires the forward pass of evaluations, and gives routers their identity experts."""
        wire(stages, self._num_identity_experts)


def is_on(config: LancetConfig) -> bool:
    """Whether the user asks for the wiring."""
    return config.of(ShortcutFlags).shortcut_moe


def check_model(args: argparse.Namespace, config: LancetConfig) -> None:
    """
    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: the wiring is not for the model.
    """
    for name, other in _REFUSED.items():
        if getattr(args, name, None):
            raise UsageError(f"{FLAG} does not work with {other} yet. Drop one of them.")
    if (args.cuda_graph_impl or "none") != "none":
        raise UsageError(f"{FLAG} does not work with --cuda-graph-impl {args.cuda_graph_impl} yet. Drop one of them.")
    if any(feature.samples(args, config) for feature in config.features):
        raise UsageError(f"{FLAG} reads Megatron's GPT data sets only. Drop it, or the flag of other samples.")
    blocker = layers_blocker(layer_kinds(args))
    if blocker is not None:
        raise UsageError(f"{FLAG}: {blocker}. Pass {PATTERN}, or drop it.")
    if not args.moe_shared_expert_intermediate_size:
        raise UsageError(
            f"{FLAG}: expected shared experts, which run while rows are under way, found none. Pass "
            "--moe-shared-expert-intermediate-size."
        )


def check_routers(args: argparse.Namespace, number: int) -> None:
    """
    Args:
        args: Megatron's arguments, validated.
        number: identity experts of each router.

    Raises:
        UsageError: routers can't have identity experts.
    """
    kinds = args.moe_router_load_balancing_type
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _BALANCING:
            raise UsageError(
                f"{IDENTITY} {number} does not work with --moe-router-load-balancing-type {kind}. Choose among "
                f"{', '.join(_BALANCING)}."
            )
    for name, other in _KEEPS_ALL_ROWS.items():
        if getattr(args, name, None):
            raise UsageError(f"{IDENTITY} {number} does not work with {other} yet. Drop one of them.")
    if args.moe_token_dispatcher_type != OWN_DISPATCHER:  # of stock modules; a plan replaces it
        raise UsageError(
            f"{IDENTITY} {number} does not work with --moe-token-dispatcher-type {args.moe_token_dispatcher_type} yet. "
            f"Pass --moe-token-dispatcher-type {OWN_DISPATCHER}."
        )


def check_checkpoint(args: argparse.Namespace, saved: Any) -> None:
    """Refuses a checkpoint of the other wiring: its weights fit, and mean another function.

    Args:
        args: Megatron's arguments of this run.
        saved: arguments of the run that saved the checkpoint.

    Raises:
        UsageError: the wirings differ.
    """
    if args.finetune:
        return
    was_wired, is_wired = (bool(getattr(one, "lancet_shortcut_moe", False)) for one in (saved, args))
    before, now = (getattr(one, "lancet_identity_experts", 0) for one in (saved, args))
    if was_wired != is_wired:
        raise UsageError(
            f"the checkpoint was trained {'with' if was_wired else 'without'} {FLAG}, which is another model with the "
            f"same weights. {'Pass it too' if was_wired else 'Drop it'}, or start from the weights with --finetune."
        )
    if before != now:
        raise UsageError(f"the checkpoint has {IDENTITY} {before}, this run {now}. Pass {IDENTITY} {before}.")


SHORTCUT = ShortcutFeature()
