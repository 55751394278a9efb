"""Arguments and files of the planner's tools."""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_lancet.cli.arguments import positive_float, positive_int, require_output_folder
from megatron_lancet.errors import UsageError
from megatron_lancet.files import RecordError
from megatron_lancet.planning.plan_file import PlanFile, read_plan_file
from megatron_lancet.planning.profile import Profile, read_profile
from megatron_lancet.planning.search.planner import PlannedStep, make_plan
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange
from megatron_lancet.schedule.units import BYTES_PER_MB, mb_to_bytes

_LARGEST = 10**15
"""No time or size of a profile is larger."""
_LARGEST_COUNT = 10**5
"""Nor is any of these, of which there may be lists."""


def add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what a plan may be."""
    group = parser.add_argument_group("what the plan may be")
    group.add_argument(
        "--num-chunks",
        nargs="+",
        type=positive_int,
        metavar="K",
        help="chunk counts to choose from; 1 is a micro-batch as a whole (default: those that were profiled)",
    )
    group.add_argument(
        "--chunk-dim",
        nargs="+",
        choices=[dim.value for dim in ChunkDim],
        help="dimensions along which micro-batches may be cut (default: all)",
    )
    group.add_argument(
        "--range",
        nargs="+",
        choices=[one.value for one in OverlapRange],
        help="what may run chunk by chunk: experts (dispatch to combine), gate (router to combine), layer (with its "
        "attention), stack (several layers without waiting at their ends) (default: all)",
    )
    group.add_argument(
        "--dw-policy",
        nargs="+",
        choices=[policy.value for policy in DwPolicy],
        help="weight gradients: fill runs them while a backward all-to-all is in flight, none at once (default: both)",
    )
    group.add_argument(
        "--max-memory-mb",
        type=positive_float,
        metavar="MB",
        help="bound (10^6 bytes) of activations and deferred weight gradients on a rank (default: none)",
    )
    group.add_argument(
        "--dw-memory-mb",
        type=positive_float,
        metavar="MB",
        help="bound (10^6 bytes) of what deferred weight gradients keep alive on a rank; written into the plan "
        "(default: none)",
    )


def limits_of(arguments: argparse.Namespace) -> Limits:
    """What the flags of :func:`add_limit_arguments` say."""
    given: dict[str, Any] = {
        "num_chunks": arguments.num_chunks and tuple(arguments.num_chunks),
        "chunk_dims": arguments.chunk_dim and tuple(ChunkDim(dim) for dim in arguments.chunk_dim),
        "ranges": arguments.range and tuple(OverlapRange(one) for one in arguments.range),
        "dw_policies": arguments.dw_policy and tuple(DwPolicy(policy) for policy in arguments.dw_policy),
        "max_memory_bytes": arguments.max_memory_mb and mb_to_bytes(arguments.max_memory_mb),
        "dw_memory_bytes": arguments.dw_memory_mb and mb_to_bytes(arguments.dw_memory_mb),
    }
    return Limits(**{name: value for name, value in given.items() if value is not None})


def load_profile(path: Path) -> Profile:
    """A profile from a file.

    Raises:
        UsageError: the file can't be read or is no profile.
    """
    try:
        profile = read_profile(path)
    except RecordError as error:
        raise UsageError(f"no usable profile: {error}") from error
    for problem in _problems(profile):
        raise UsageError(f"no usable profile: {path}: {problem}")
    return profile


def _problems(profile: Profile) -> Iterator[str]:
    """What no profile of a run can say. Types were checked when it was read."""
    model = profile.model
    if not model.layer_kinds or len(model.layer_kinds) != len(model.stage_of_layer):
        yield "it must say kind and stage of the same layers, at least one"
    stages = sorted(set(model.stage_of_layer))
    if stages != list(range(len(stages))):
        yield f"pipeline stages count from 0 without gaps, found {stages[:8]}"
    for name in ("micro_batch_size", "seq_length", "num_micro_batches", "ep_size", "world_size"):
        if getattr(model, name) < 1:
            yield f"model.{name} must be at least 1, found {getattr(model, name)}"
    for name in ("num_micro_batches", "topk", "num_experts", "ep_size"):
        if getattr(model, name) > _LARGEST_COUNT:
            yield f"model.{name} must be at most {_LARGEST_COUNT}"
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if isinstance(value, int) and not 0 <= value <= _LARGEST:
            yield f"model.{field.name} must be 0 to {_LARGEST}, found {str(value)[:20]}"
    for name in ("ops", "weight_grads", "memory"):
        for index, entry in enumerate(getattr(profile, name)):
            wrong = [f.name for f in dataclasses.fields(entry) if _is_wild(getattr(entry, f.name))]
            wrong += ["num_chunks"] if not 1 <= entry.num_chunks <= _LARGEST_COUNT else []
            if wrong:
                yield f"{name}[{index}].{wrong[0]} is {str(getattr(entry, wrong[0]))[:20]}"
    link = profile.link
    curves = sum(link.all_to_all + link.queued + link.all_reduce, ())
    if any(map(_is_wild, (link.counts_ms, link.compute_slowdown, profile.rest_ms, *curves))):
        yield "times and sizes must be numbers of at least 0"
    gradients = profile.gradients
    if gradients is not None and max(gradients.dense_ranks, gradients.expert_ranks) > _LARGEST_COUNT:
        yield f"gradients.dense_ranks and expert_ranks must be at most {_LARGEST_COUNT}"
    for index, chunk in enumerate(profile.routing):
        rows = chunk.sent + chunk.received
        if len(chunk.sent) != model.ep_size or len(chunk.received) != model.ep_size or any(map(_is_wild, rows)):
            yield f"routing[{index}] must have rows of at least 0 for each of {model.ep_size} ranks"


def _is_wild(value: object) -> bool:
    return isinstance(value, int | float) and not 0 <= value <= _LARGEST


def fitting_plan(profile: Profile, limits: Limits) -> PlannedStep:
    """The planner's choice, if it keeps the limits' memory bound.

    Raises:
        RecordError: the profile lacks something, or the limits leave no plan.
        UsageError: nothing fits into memory.
    """
    planned = make_plan(profile, limits)
    best = planned.alternatives[0]
    if not best.fits:
        assert limits.max_memory_bytes is not None
        found_mb, bound_mb = (size / BYTES_PER_MB for size in (best.prediction.peak_bytes, limits.max_memory_bytes))
        raise UsageError(
            f"no plan fits into --max-memory-mb {bound_mb:g}: the smallest one found takes about {found_mb:.0f} MB. "
            "Allow more, or profile the model with a smaller micro-batch or recompute"
        )
    return planned


def load_plan(path: Path) -> PlanFile:
    """A plan file.

    Raises:
        UsageError: the file can't be read or is no plan file.
    """
    try:
        return read_plan_file(path)
    except RecordError as error:
        raise UsageError(f"no usable plan: {error}") from error


def check_outputs(*paths: Path | None) -> None:
    """Refuses output files that can't be written, before any work is done.

    Raises:
        UsageError: says which, and why.
    """
    for path in paths:
        if path is not None:
            require_output_folder(path)
