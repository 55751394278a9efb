"""Places experts on ranks by their measured load, for training or for a server.

  lancet plan experts profile.json --output placement.json
  lancet plan experts profile.json --ep-size 16 --ranks-per-node 8 --output placement.json
  lancet plan experts profile.json --ep-size 8 --replicas 16 --format sglang --output location.json

At each all-to-all all ranks wait for the one with most rows. "most/mean" is its load over the mean of the ranks. With
--ranks-per-node the rows that the busiest node exchanges with others count as well. Training reads the file with
--lancet-expert-placement. Replicas are for servers only: docs/features/placement.md names the formats.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_lancet.cli.arguments import positive_int
from megatron_lancet.cli.planning import check_outputs, load_expert_load
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.lab.plan_text import placement_table
from megatron_lancet.planning.load.expert_load import ExpertLoad
from megatron_lancet.planning.load.placement import placement_to_json, solve
from megatron_lancet.planning.load.server_map import ServerFormat, server_map, server_map_text, with_replicas

_TRAINING = "training"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("load", type=Path, metavar="FILE", help="profile from lancet plan profile, or a load of experts")
    add("--ep-size", type=positive_int, metavar="P", help="expert-parallel ranks (default: as measured)")
    add("--ranks-per-node", type=positive_int, metavar="L", help="count rows between nodes of L ranks (default: don't)")
    add("--replicas", type=positive_int, metavar="R", help="slots for replicas in each layer, on all ranks together")
    formats = (_TRAINING, *(one.value for one in ServerFormat))
    add("--format", choices=formats, default=_TRAINING, help="who reads the file (default: training)")
    add("--output", type=Path, metavar="FILE.json", help="write the placement")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    arguments = parse_arguments(argv)
    check_outputs(arguments.output)
    if arguments.replicas is not None and arguments.format == _TRAINING:
        servers = ", ".join(one.value for one in ServerFormat)
        raise UsageError(f"--replicas {arguments.replicas} is for servers: pass --format ({servers}), or drop it.")
    if arguments.replicas is not None and arguments.ranks_per_node is not None:
        raise UsageError("--replicas balances ranks and does not look at nodes: drop --ranks-per-node.")
    load = load_expert_load(arguments.load)
    ep_size = arguments.ep_size or load.ep_size
    placements = _placements(load, ep_size, arguments)
    print(placement_table.as_text(load, placements, ep_size, arguments.ranks_per_node))
    if arguments.output is not None:
        if arguments.format == _TRAINING:
            text = placement_to_json(placements)
        else:
            text = server_map_text(server_map(load, placements, ep_size, ServerFormat(arguments.format)))
        atomic_write(arguments.output, text)


def _placements(load: ExpertLoad, ep_size: int, arguments: argparse.Namespace) -> dict[int, tuple[int, ...]]:
    try:
        if arguments.replicas is None:
            return {layer.layer: solve(layer, ep_size, arguments.ranks_per_node) for layer in load.layers}
        return {layer.layer: with_replicas(layer.rows_per_expert, arguments.replicas, ep_size) for layer in load.layers}
    except ValueError as error:
        raise UsageError(f"no placement: {error}. Change --ep-size, --ranks-per-node or --replicas.") from error


if __name__ == "__main__":
    run_command(main)
