"""Predicts a step for each expert-parallel size from a profile, to choose the number of experts on a rank.

  tools/pack_experts.py profile.json
  tools/pack_experts.py profile.json --memory-mb 64000 --overlap-grad-reduce --use-distributed-optimizer
  tools/pack_experts.py profile.json --world-size 64 --ranks-per-node 8 --intra-gbps 3600 --inter-gbps 400

Fewer expert-parallel ranks (EP) send fewer rows to each other, keep more experts, and sum more expert gradients with
their replicas (expert-DP). "covered" is Lina's rule: a chunk's experts take at least as long as its all-to-all. The
predicted step includes everything, with a separate plan for each size. docs/expert_packing.md explains the computation
and how to continue a run with another size.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_lancet.cli.arguments import positive_float, positive_int
from megatron_lancet.cli.planning import add_limit_arguments, check_outputs, limits_of, load_profile
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files import RecordError, atomic_write
from megatron_lancet.lab.what_if import packing_table
from megatron_lancet.lab.what_if.arguments import (
    add_network_arguments,
    add_reduction_arguments,
    add_routing_argument,
    network_of,
    reduced_as_asked,
)
from megatron_lancet.lab.what_if.expert_packing import StateMemory, pack_experts
from megatron_lancet.lab.what_if.forecast import Forecaster
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.units import BYTES_PER_MB


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, metavar="PROFILE", help="profile from tools/profile_model.py")
    parser.add_argument(
        "--memory-mb",
        type=positive_float,
        metavar="MB",
        help="memory of a rank (10^6 bytes) for weights, gradients, optimizer, activations and deferred dW "
        "(default: no limit)",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="(default: text)")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write everything as JSON")
    group = parser.add_argument_group("what if (default: as profiled)")
    group.add_argument("--world-size", type=positive_int, metavar="N", help="number of ranks")
    group.add_argument(
        "--num-micro-batches", type=positive_int, metavar="N", help="micro-batches of a step on each pipeline"
    )
    add_network_arguments(group)
    add_routing_argument(group)
    add_reduction_arguments(parser)
    add_limit_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    arguments = parse_arguments(argv)
    check_outputs(arguments.output)
    profile = reduced_as_asked(load_profile(arguments.profile), arguments, optimizer_counts=True)
    limits = limits_of(arguments)

    def plan_within(moved: Profile, room_bytes: int | None) -> Plan:
        bounds = [bound for bound in (limits.max_memory_bytes, room_bytes) if bound is not None]
        return make_plan(moved, dataclasses.replace(limits, max_memory_bytes=min(bounds, default=None))).plan

    try:
        choice = pack_experts(
            Forecaster(profile, network_of(arguments)),
            plan_within,
            arguments.world_size,
            arguments.num_micro_batches,
            arguments.routing,
            StateMemory(arguments.use_distributed_optimizer),
            None if arguments.memory_mb is None else arguments.memory_mb * BYTES_PER_MB,
        )
    except RecordError as error:
        raise UsageError(f"no prediction from {arguments.profile}: {error}") from error
    plain = {
        "profile": profile.model.name,
        "device": profile.device,
        "routing": str(arguments.routing),
        **packing_table.as_plain(choice, profile),
    }
    if arguments.format == "json":
        print(json.dumps(plain, indent=1))
    else:
        print(f"profile: {profile.model.name} on {profile.device}")
        print(packing_table.as_text(choice, profile))
    if arguments.output is not None:
        atomic_write(arguments.output, json.dumps(plain, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
