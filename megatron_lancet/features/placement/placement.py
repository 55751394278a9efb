"""``--lancet-expert-placement FILE``: which rank of a run holds which expert."""

import argparse
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_lancet.checkpoint.files import load_folder, name_of, tracked_step
from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.features.placement.flags import PlacementFlags
from megatron_lancet.features.placement.layers import layers_with_experts, place_experts, slots_of
from megatron_lancet.files.reader import RecordError
from megatron_lancet.model.gpt import LanguageModel
from megatron_lancet.planning.load.placement import Placement, contiguous, placement_to_json, read_placement
from megatron_lancet.runtime.collectives import from_all_ranks
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.ranges import name_ranks
from megatron_lancet.training.layer_pattern import layer_kinds, mtp_layer_kinds
from megatron_lancet.training.platform.launcher import MOCKED

FLAG = "--lancet-expert-placement"
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


def choose_placement(
    args: argparse.Namespace, config: LancetConfig, plan: Plan | None
) -> Mapping[int, Placement] | None:
    """Reads the placement of a run's layers; None where Megatron places them.

    Args:
        args: Megatron's arguments, validated.
        plan: None for stock modules.

    Raises:
        UsageError: the run can't place experts as it is asked to, or the file is not for its model.
    """
    path = config.of(PlacementFlags).expert_placement
    if path is None:
        return None
    _check_can_place(args, f"{FLAG} {path}", plan)
    return _placement_of(args, path)


def _check_can_place(args: argparse.Namespace, flag: str, plan: Plan | None) -> None:
    if args.expert_model_parallel_size == 1:
        raise UsageError(
            f"{flag} is about the ranks of expert parallelism, but --expert-model-parallel-size is 1. Drop the flag."
        )
    if plan is None:
        raise UsageError(
            f"{flag} needs the overlapping block, but this run has stock Megatron modules, which hold experts in "
            "order. Drop it, or --lancet-plan off."
        )
    for other, advice in _blockers(args):
        raise UsageError(f"{flag} does not work with {other}: {advice}, or drop the flag.")


def _blockers(args: argparse.Namespace) -> Iterable[tuple[str, str]]:
    if args.save or args.load or args.pretrained_checkpoint:
        for flag, name in (("--ckpt-format", args.ckpt_format), ("--ckpt-convert-format", args.ckpt_convert_format)):
            if name not in (None, "torch_dist"):
                yield f"{flag} {name}", "its files have no numbers of experts; pass torch_dist"
        if args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable and _keeps_optimizer(args):
            yield (
                "--use-distributed-optimizer as it is saved by default",
                f"optimizer state would be sharded by rank; pass {_RESHARDABLE}",
            )
    folder = load_folder(args)
    if folder is not None and _is_legacy(folder, args):
        yield f"the checkpoint in {folder}", "its files are by rank; save it again with --ckpt-format torch_dist"
    if getattr(args, "lancet_identity_experts", 0):  # a flag of a feature, which may be deleted
        yield "--lancet-identity-experts", "each of a router's scores must have an expert; drop that flag"
    if args.fp8_param_gather or getattr(args, "fp4_param", False):
        yield "weights that are stored in fp8 or fp4", "they are moved as they are initialised; drop --fp8-param-gather"


def _is_legacy(folder: Path, args: argparse.Namespace) -> bool:
    """Whether the checkpoint to load has a file for each rank, as ``--ckpt-format torch`` writes it."""
    step = args.ckpt_step or tracked_step(folder, args.ckpt_format)
    return step is not None and any((folder / name_of(step)).glob("mp_rank_0*"))


def _keeps_optimizer(args: argparse.Namespace) -> bool:
    return bool((args.save and not args.no_save_optim) or (args.load and not args.no_load_optim and not args.finetune))


def _placement_of(args: argparse.Namespace, path: Path) -> Mapping[int, Placement]:
    try:
        placements = read_placement(path)
    except RecordError as error:
        raise UsageError(f"{FLAG} {error}.") from error
    moe_layers = _moe_layers(args)
    unknown = sorted(set(placements) - set(moe_layers))
    if unknown:
        raise UsageError(
            f"{FLAG} {path}: layer {unknown[0]} has no experts in this model, which has them in layers "
            f"{_listed(moe_layers)}. Place the experts of this model with lancet plan experts."
        )
    for layer, experts in placements.items():
        if len(experts) != args.num_experts:
            raise UsageError(
                f"{FLAG} {path}: layer {layer} has {len(experts)} experts, this model has --num-experts "
                f"{args.num_experts}. Place the experts of this model with lancet plan experts."
            )
    return placements


def _moe_layers(args: argparse.Namespace) -> list[int]:
    """Numbers of the layers with experts; a repeated prediction has the first of its numbers."""
    num_predictions = args.mtp_num_layers or 0
    if num_predictions and args.mtp_use_repeated_layer:
        num_predictions = 1
    kinds = [*layer_kinds(args), *(mtp_layer_kinds(args) * num_predictions)]
    return [number for number, kind in enumerate(kinds, start=1) if kind.has_experts]


def _listed(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 4 else ", ".join(map(str, numbers)) or "none"


def check_reshardable(args: argparse.Namespace, saved: Any) -> None:
    """Refuse a checkpoint whose optimizer state is sharded by rank. For a run whose experts may be on other ranks.

    Args:
        args: Megatron's arguments of this run.
        saved: arguments of the run that saved the checkpoint.

    Raises:
        UsageError: names the flag to pass.
    """
    if args.no_load_optim or args.finetune or getattr(saved, "no_save_optim", False):
        return
    if saved.use_distributed_optimizer and not getattr(saved, "dist_ckpt_optim_fully_reshardable", False):
        raise UsageError(
            "experts may be on other ranks than Megatron's, and this checkpoint's distributed optimizer state is "
            f"sharded by rank. Save it with {_RESHARDABLE}, or pass --no-load-optim."
        )


def apply_placement(stages: Sequence[LanguageModel], placements: Mapping[int, Placement]) -> None:
    """Puts the experts of prepared stages at their slots, with the weights that stock gives them.

    To be called before DDP wraps the stages. Collective over all ranks of the world.

    Raises:
        UsageError: ranks have different placements, or a weight belongs to several experts.
    """
    digests = from_all_ranks(hashlib.sha256(placement_to_json(placements).encode()).hexdigest())
    if len(set(digests)) > 1:
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        raise UsageError(
            f"{FLAG}: {name_ranks(others)} have another placement than rank 0. Start all ranks with the same file."
        )
    for moe in layers_with_experts(stages):
        slots_of(moe)
        if moe.number in placements:
            place_experts(moe, placements[moe.number], moves_weights=dist.get_backend() != MOCKED)


def placement_note(placements: Mapping[int, Placement] | None) -> str:
    """The placement's part of the plan's line; empty for Megatron's."""
    if not placements:
        return ""
    moved = sum(experts != contiguous(len(experts)) for experts in placements.values())
    return f"; experts of {moved} layer{'s' if moved != 1 else ''} are not in Megatron's order"
