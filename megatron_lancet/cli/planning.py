"""Arguments and files shared by the planner's tools."""

import argparse
from pathlib import Path
from typing import Any

from megatron_lancet.cli.arguments import count, positive_float, positive_int, require_output_folder
from megatron_lancet.errors import UsageError
from megatron_lancet.files.reader import RecordError, parse_object, read_text
from megatron_lancet.planning.load.expert_load import ExpertLoad, read_expert_load
from megatron_lancet.planning.plan_file import PlanFile, read_plan_file
from megatron_lancet.planning.profile import Profile, read_profile
from megatron_lancet.planning.search.planner import PlannedStep, make_plan
from megatron_lancet.planning.search.search_space import TILES, Limits
from megatron_lancet.schedule.plan import ChunkDim, Dispatch, DwPolicy, OverlapRange
from megatron_lancet.units import BYTES_PER_MB, mb_to_bytes

_PAIRING = {"auto": (False, True), "on": (True,), "off": (False,)}
_DISPATCHES = {"auto": tuple(Dispatch.known().values()), **{name: (one,) for name, one in Dispatch.known().items()}}


def add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that restrict the plan."""
    add = parser.add_argument_group("restrictions of the plan").add_argument
    dims, ranges, policies = ([one.value for one in kind] for kind in (ChunkDim, OverlapRange, DwPolicy))
    counts = "chunk counts to choose from; 1 is the full micro-batch (default: the profiled ones)"
    add("--num-chunks", nargs="+", type=positive_int, metavar="K", help=counts)
    add("--chunk-dim", nargs="+", choices=dims, help="dimensions along which micro-batches may be cut (default: all)")
    chunked = (
        "ops that may run in chunks: experts (dispatch to combine), gate (router to combine), stack (several "
        "layers with their attention, without a barrier between them) (default: all)"
    )
    add("--range", nargs="+", choices=ranges, help=chunked)
    deferred = "dW: fill runs it while a backward all-to-all is in flight, none immediately (default: both)"
    add("--dw-policy", nargs="+", choices=policies, help=deferred)
    pairing = "whether each backward is paired with the next forward: auto lets the prediction decide (default: auto)"
    add("--pairing", choices=tuple(_PAIRING), default="auto", help=pairing)
    carried = (
        "what all-to-alls carry: plain a row per token and expert, dedup a row per token and rank that holds any of "
        "its experts, two-hop a row per token and node and from there one per rank; auto the dispatch that is "
        "predicted fastest (default: auto)"
    )
    add("--dispatch", choices=tuple(_DISPATCHES), default="auto", help=carried)
    tiles = (
        "parts, with a message each, in which the rows of a chunk may go to other ranks; 0 is one message of all rows "
        f"(default: 0, and {' '.join(map(str, TILES))} with one chunk if the profile has times of such parts)"
    )
    add("--tiles", nargs="+", type=count, metavar="N", help=tiles)
    memory = "bound (10^6 bytes) of activations and deferred weight gradients on a rank (default: none)"
    add("--max-memory-mb", type=positive_float, metavar="MB", help=memory)
    pinned = "bound (10^6 bytes) of memory kept alive by deferred dW on a rank; written into the plan (default: none)"
    add("--dw-memory-mb", type=positive_float, metavar="MB", help=pinned)


def limits_of(arguments: argparse.Namespace) -> Limits:
    """Returns the limits given by the flags of :func:`add_limit_arguments`."""
    given: dict[str, Any] = {
        "num_chunks": arguments.num_chunks and tuple(arguments.num_chunks),
        "chunk_dims": arguments.chunk_dim and tuple(ChunkDim(dim) for dim in arguments.chunk_dim),
        "ranges": arguments.range and tuple(OverlapRange(one) for one in arguments.range),
        "dw_policies": arguments.dw_policy and tuple(DwPolicy(policy) for policy in arguments.dw_policy),
        "pairing": _PAIRING[arguments.pairing],
        "dispatches": _DISPATCHES[arguments.dispatch],
        "tiles": arguments.tiles and tuple(arguments.tiles),
        "max_memory_bytes": arguments.max_memory_mb and mb_to_bytes(arguments.max_memory_mb),
        "dw_memory_bytes": arguments.dw_memory_mb and mb_to_bytes(arguments.dw_memory_mb),
    }
    return Limits(**{name: value for name, value in given.items() if value is not None})


def load_profile(path: Path) -> Profile:
    """Reads a profile.

    Raises:
        UsageError: the file can't be read or is not a profile.
    """
    try:
        return read_profile(path)
    except RecordError as error:
        raise UsageError(
            f"no usable profile: {error}. lancet plan profile and lancet trace profile make one"
        ) from error


def load_expert_load(path: Path) -> ExpertLoad:
    """Reads the load of experts from a file of its own, or from a profile.

    Raises:
        UsageError: the file can't be read, is neither, or holds no load.
    """
    try:
        is_profile = "model" in parse_object(read_text(path), str(path))
        load = read_profile(path).expert_load if is_profile else read_expert_load(path)
    except RecordError as error:
        raise UsageError(f"no usable load of experts: {error}") from error
    if load is None or not load.layers:
        raise UsageError(
            f"{path} has no load of experts: the profile is of a mocked world, or of a model without experts. "
            "Profile the model again with lancet plan profile on all its ranks."
        )
    return load


def fitting_plan(profile: Profile, limits: Limits) -> PlannedStep:
    """Returns the planner's choice, which keeps the memory bound of the limits.

    Raises:
        RecordError: the profile lacks something, or the limits leave no plan.
        UsageError: no plan fits into memory.
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
    """Reads a plan file.

    Raises:
        UsageError: the file can't be read or is not a plan file.
    """
    try:
        return read_plan_file(path)
    except RecordError as error:
        raise UsageError(f"no usable plan: {error}") from error


def check_outputs(*paths: Path | None) -> None:
    """Checks before any work is done that the files can be written.

    Raises:
        UsageError: a file can't be written; the message gives the reason.
    """
    for path in paths:
        if path is not None:
            require_output_folder(path)
