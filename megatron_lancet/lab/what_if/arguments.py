"""Arguments for networks, routing and gradients, shared by the what-if tools."""

import argparse
import dataclasses
import math
from typing import Any

from megatron_lancet.cli.arguments import positive_float, positive_int
from megatron_lancet.errors import UsageError
from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.what_if.forecast import NetworkChoice, Routing
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.gradient_overlap import with_reduction
from megatron_lancet.schedule.reductions import DEFAULT_CHUNK_MB, CommPriority, GradientReduction, default_bucket_bytes
from megatron_lancet.units import mb_to_bytes


def add_network_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the flags that :func:`network_of` reads."""
    add = group.add_argument
    inside, between = "of one rank inside a node", "of one rank between nodes (default: as inside)"
    add("--ranks-per-node", type=positive_int, metavar="N", help="(default: all ranks on one node)")
    add("--intra-gbps", type=positive_float, metavar="GB", help=f"bandwidth {inside}, Gb/s each way")
    add("--intra-latency-us", type=_latency, metavar="US", help="latency of a message inside a node")
    add("--inter-gbps", type=positive_float, metavar="GB", help=f"bandwidth {between}, Gb/s each way")
    add("--inter-latency-us", type=_latency, metavar="US", help="latency between nodes (default: as inside)")


def network_of(arguments: argparse.Namespace) -> NetworkChoice:
    """Returns the network given by the flags.

    Raises:
        UsageError: the flags describe links between nodes, and there is one node.
    """
    for name in ("inter_gbps", "inter_latency_us"):
        if getattr(arguments, name) is not None and arguments.ranks_per_node is None:
            raise UsageError(
                f"--{name.replace('_', '-')} is about links between nodes, and all ranks are on one: pass "
                "--ranks-per-node too, or drop it"
            )
    return NetworkChoice(
        arguments.ranks_per_node,
        arguments.intra_gbps,
        arguments.intra_latency_us,
        arguments.inter_gbps,
        arguments.inter_latency_us,
    )


def add_routing_argument(group: argparse._ActionsContainer, has_profile: bool = True) -> None:
    """Adds --routing.

    Args:
        has_profile: whether there is a profile with a measured distribution.
    """
    measured = "as in the profile (default), even" if has_profile else "even (default)"
    group.add_argument(
        "--routing",
        type=_routing if has_profile else _made_up_routing,
        default=Routing() if has_profile else Routing("even"),
        metavar="{measured,even,zipf:S}" if has_profile else "{even,zipf:S}",
        help=f"distribution of rows over ranks: {measured}, or from experts whose popularity falls with their number "
        "to the power of S",
    )


def add_reduction_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that :func:`reduced_as_asked` reads."""
    add = parser.add_argument_group("reduction of gradients over ranks (default: as profiled)").add_argument
    overlap = "reduce during the backward pass, on the links of the all-to-alls"
    add("--overlap-grad-reduce", action="store_true", help=overlap)
    first = "which of them goes first, as --lancet-comm-priority (default: off, they share the links)"
    add("--comm-priority", choices=[one.value for one in CommPriority], help=first)
    chunk = f"size of a micro-op, with the priority, as --lancet-grad-chunk-mb (default: {DEFAULT_CHUNK_MB:g})"
    add("--grad-chunk-mb", type=positive_float, metavar="MB", help=chunk)
    add("--bucket-mb", type=positive_float, metavar="MB", help="size of a bucket of gradients (default: Megatron's)")
    sharded = "gradients are reduce-scattered, the optimizer is sharded"
    add("--use-distributed-optimizer", action="store_true", help=sharded)
    untied = "the output layer has a weight of its own, complete when the backward pass begins"
    add("--untie-embeddings-and-output-weights", action="store_true", help=untied)


def reduced_as_asked(profile: Profile, arguments: argparse.Namespace) -> Profile:
    """Returns the profile of a run with these flags, unchanged without them.

    Raises:
        UsageError: a flag needs --overlap-grad-reduce, or the profile has no times of reductions.
    """
    if arguments.overlap_grad_reduce:
        try:
            return with_reduction(profile, _reduction(profile, arguments))
        except RecordError as error:
            raise UsageError(f"--overlap-grad-reduce: {error}") from error
    flags = ("comm_priority", "grad_chunk_mb", "bucket_mb", "untie_embeddings_and_output_weights")
    for name in (*flags, "use_distributed_optimizer"):
        if getattr(arguments, name):
            raise UsageError(
                f"--{name.replace('_', '-')} applies to reductions during the backward pass: pass "
                "--overlap-grad-reduce too, or drop it"
            )
    return profile


def _reduction(profile: Profile, arguments: argparse.Namespace) -> GradientReduction:
    facts, before = profile.model, profile.gradients
    if before is None:
        num_ranks = facts.world_size // len(set(facts.stage_of_layer))
        if num_ranks == 1:
            raise UsageError(
                "--overlap-grad-reduce: the profiled run has one data-parallel rank, so it sums no gradients and the "
                "profile has no times of them. Profile a run with at least two, or drop the flag"
            )
        before = GradientReduction(
            dense_ranks=num_ranks,
            expert_ranks=max(1, num_ranks // (facts.ep_size * facts.expert_tp_size)),
            bucket_bytes=default_bucket_bytes(num_ranks),
            has_late_head=True,
        )
    given: dict[str, Any] = {
        "priority": arguments.comm_priority and CommPriority(arguments.comm_priority),
        "chunk_bytes": arguments.grad_chunk_mb and mb_to_bytes(arguments.grad_chunk_mb),
        "bucket_bytes": arguments.bucket_mb and mb_to_bytes(arguments.bucket_mb),
        "is_scatter": True if arguments.use_distributed_optimizer else None,
        "has_late_head": False if arguments.untie_embeddings_and_output_weights else None,
    }
    return dataclasses.replace(before, **{name: value for name, value in given.items() if value is not None})


def _latency(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected microseconds, at least 0, got {text!r}")
    return value


def _made_up_routing(text: str) -> Routing:
    if text == "measured":
        raise argparse.ArgumentTypeError("expected even or zipf:S: nothing was measured")
    return _routing(text)


def _routing(text: str) -> Routing:
    kind, _, exponent = text.partition(":")
    try:
        value = float(exponent or "nan")
    except ValueError:
        value = math.nan
    if kind == "zipf" and 0 <= value <= 100:
        return Routing(kind, value)
    if text in ("measured", "even"):
        return Routing(text)
    raise argparse.ArgumentTypeError(f"expected measured, even or zipf:S with S from 0 to 100, got {text!r}")
