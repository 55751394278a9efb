"""Arguments about networks, routing and gradients that the what-if tools share."""

import argparse
import dataclasses
import math

from megatron_lancet.cli.arguments import positive_float, positive_int
from megatron_lancet.errors import UsageError
from megatron_lancet.files import RecordError
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.gradient_overlap import with_reduction
from megatron_lancet.planning.what_if.forecast import NetworkChoice, Routing
from megatron_lancet.schedule.reductions import DEFAULT_CHUNK_MB, CommPriority, GradientReduction, default_bucket_bytes
from megatron_lancet.schedule.units import mb_to_bytes


def add_network_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the flags of :func:`network_of`."""
    group.add_argument("--ranks-per-node", type=positive_int, metavar="N", help="(default: all ranks on one node)")
    group.add_argument(
        "--intra-gbps", type=positive_float, metavar="GB", help="Gb/s of one rank inside a node, each way"
    )
    group.add_argument("--intra-latency-us", type=_latency, metavar="US", help="of one message inside a node")
    group.add_argument(
        "--inter-gbps", type=positive_float, metavar="GB", help="Gb/s of one rank between nodes (default: as inside)"
    )
    group.add_argument(
        "--inter-latency-us", type=_latency, metavar="US", help="of one message between nodes (default: as inside)"
    )


def network_of(arguments: argparse.Namespace) -> NetworkChoice:
    """What the flags say of the network."""
    return NetworkChoice(
        arguments.ranks_per_node,
        arguments.intra_gbps,
        arguments.intra_latency_us,
        arguments.inter_gbps,
        arguments.inter_latency_us,
    )


def add_routing_argument(group: argparse._ArgumentGroup) -> None:
    """Adds --routing."""
    group.add_argument(
        "--routing",
        type=_routing,
        default=Routing(),
        metavar="{measured,even,zipf:S}",
        help="who receives how many rows: the profile's histogram (default), the same for all, or experts whose "
        "popularity falls with their place to the power of S",
    )


def add_reduction_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of :func:`reduced_as_asked`."""
    group = parser.add_argument_group("how gradients are summed over ranks (default: as the profile says)")
    group.add_argument(
        "--overlap-grad-reduce", action="store_true", help="beside the backward pass, on the all-to-alls' wire"
    )
    group.add_argument(
        "--comm-priority",
        choices=[one.value for one in CommPriority],
        help="who gets the wire then, as --lancet-comm-priority (default: off, both)",
    )
    group.add_argument(
        "--grad-chunk-mb",
        type=positive_float,
        metavar="MB",
        help=f"of a micro-op, with the priority, as --lancet-grad-chunk-mb (default: {DEFAULT_CHUNK_MB:g})",
    )
    group.add_argument(
        "--bucket-mb", type=positive_float, metavar="MB", help="of a bucket of gradients (default: Megatron's)"
    )
    group.add_argument(
        "--use-distributed-optimizer", action="store_true", help="gradients are reduce-scattered, optimizer is divided"
    )
    group.add_argument(
        "--untie-embeddings-and-output-weights",
        action="store_true",
        help="the output layer has a weight of its own, complete when the backward pass begins",
    )


def reduced_as_asked(profile: Profile, arguments: argparse.Namespace, optimizer_counts: bool = False) -> Profile:
    """The profile of a run with these flags; as it is where they say nothing.

    Args:
        optimizer_counts: --use-distributed-optimizer says something without --overlap-grad-reduce, too.

    Raises:
        UsageError: flags that need --overlap-grad-reduce without it, or a profile without times of reductions.
    """
    if arguments.overlap_grad_reduce:
        try:
            return with_reduction(profile, _reduction(profile, arguments))
        except RecordError as error:
            raise UsageError(f"--overlap-grad-reduce: {error}") from error
    flags = ["comm_priority", "grad_chunk_mb", "bucket_mb", "untie_embeddings_and_output_weights"]
    flags += [] if optimizer_counts else ["use_distributed_optimizer"]
    for name in flags:
        if getattr(arguments, name):
            raise UsageError(
                f"--{name.replace('_', '-')} says how gradients are reduced beside the backward pass: pass "
                "--overlap-grad-reduce too, or drop it"
            )
    return profile


def _reduction(profile: Profile, arguments: argparse.Namespace) -> GradientReduction:
    """As measured or as by default, but for what is given."""
    facts, before = profile.model, profile.gradients
    if before is None:
        num_ranks = facts.world_size // len(set(facts.stage_of_layer))
        if num_ranks == 1:
            raise UsageError(
                "--overlap-grad-reduce: the profiled run has one data-parallel rank, so it sums no gradients and the "
                "profile has no times of it. Profile a run with at least two, or drop the flag"
            )
        before = GradientReduction(
            dense_ranks=num_ranks,
            expert_ranks=max(1, num_ranks // facts.ep_size),
            bucket_bytes=default_bucket_bytes(num_ranks),
            has_late_head=True,
        )
    if arguments.comm_priority is not None:
        before = dataclasses.replace(before, priority=CommPriority(arguments.comm_priority))
    if arguments.grad_chunk_mb is not None:
        before = dataclasses.replace(before, chunk_bytes=mb_to_bytes(arguments.grad_chunk_mb))
    if arguments.bucket_mb is not None:
        before = dataclasses.replace(before, bucket_bytes=mb_to_bytes(arguments.bucket_mb))
    if arguments.use_distributed_optimizer:
        before = dataclasses.replace(before, is_scatter=True)
    if arguments.untie_embeddings_and_output_weights:
        before = dataclasses.replace(before, has_late_head=False)
    return before


def _latency(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected microseconds, at least 0, got {text!r}")
    return value


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
