"""The flags of an estimate. Without torch, so that ``--help`` is there at once."""

import argparse
from pathlib import Path

from megatron_lancet.cli.arguments import add_trust_argument
from megatron_lancet.errors import UsageError
from megatron_lancet.lab.estimate.cluster_text import EXAMPLE, FORM, ClusterChoice
from megatron_lancet.lab.what_if.arguments import add_routing_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the tool; all others are the launch's, in front of which they may stand or behind it."""
    parser.add_argument("--cluster", metavar=FORM, help=f"the cluster, for example {EXAMPLE}")
    add_routing_argument(parser, has_profile=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--published", action="store_true", help="predict public speed-ups instead, and print both: docs/estimate.md"
    )
    add_trust_argument(parser)


def cluster_of(options: argparse.Namespace) -> ClusterChoice:
    """The cluster that the flag names.

    Raises:
        UsageError: there is none, or it has another form.
    """
    if options.cluster is None:
        raise UsageError(f"--cluster is missing: pass {FORM}, for example {EXAMPLE}.")
    return ClusterChoice.parse(options.cluster)
