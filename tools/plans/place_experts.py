"""Places experts on ranks by their measured load.

  lancet plan experts profile.json --output placement.json
  lancet plan experts profile.json --ep-size 16 --ranks-per-node 8 --output placement.json

At each all-to-all all ranks wait for the one with most rows. "most/mean" is its load over the mean of the ranks. With
--ranks-per-node the rows that the busiest node exchanges with others count as well. Training reads the file with
--lancet-expert-placement (docs/features/placement.md).
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


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("load", type=Path, metavar="FILE", help="profile from lancet plan profile, or a load of experts")
    add("--ep-size", type=positive_int, metavar="P", help="expert-parallel ranks (default: as measured)")
    add("--ranks-per-node", type=positive_int, metavar="L", help="count rows between nodes of L ranks (default: don't)")
    add("--output", type=Path, metavar="FILE.json", help="write the placement")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    arguments = parse_arguments(argv)
    check_outputs(arguments.output)
    load = load_expert_load(arguments.load)
    ep_size = arguments.ep_size or load.ep_size
    placements = _placements(load, ep_size, arguments.ranks_per_node)
    print(placement_table.as_text(load, placements, ep_size, arguments.ranks_per_node))
    if arguments.output is not None:
        atomic_write(arguments.output, placement_to_json(placements))


def _placements(load: ExpertLoad, ep_size: int, ranks_per_node: int | None) -> dict[int, tuple[int, ...]]:
    try:
        return {layer.layer: solve(layer, ep_size, ranks_per_node) for layer in load.layers}
    except ValueError as error:
        raise UsageError(f"no placement: {error}. Change --ep-size or --ranks-per-node.") from error


if __name__ == "__main__":
    run_command(main)
