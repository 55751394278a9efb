"""The flags of an estimate. Without torch, so that ``--help`` is there at once."""

import argparse
import math
from pathlib import Path

from megatron_lancet.cli.arguments import add_trust_argument
from megatron_lancet.errors import UsageError
from megatron_lancet.lab.estimate.cluster_text import EXAMPLE, FORM, ClusterChoice
from megatron_lancet.lab.estimate.devices import LAUNCH_US, LOCAL_LAUNCH_US, Span
from megatron_lancet.lab.what_if.arguments import add_routing_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the tool; all others are the launch's, in front of which they may stand or behind it."""
    parser.add_argument("--cluster", metavar=FORM, help=f"the cluster, for example {EXAMPLE}")
    add_routing_argument(parser, has_profile=False)
    parser.add_argument(
        "--launch-us",
        nargs=2,
        type=float,
        metavar=("LOW", "HIGH"),
        help="host time of a kernel's launch, Python included, in us (default: "
        f"{LOCAL_LAUNCH_US.fast:g} to {LOCAL_LAUNCH_US.slow:g} with Megatron's local layers, {LAUNCH_US.fast:g} to "
        f"{LAUNCH_US.slow:g} with Transformer Engine's)",
    )
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


def launch_us_of(options: argparse.Namespace) -> Span | None:
    """The host time of a launch that the flag names; None without it.

    Raises:
        UsageError: it is no range above 0.
    """
    if options.launch_us is None:
        return None
    low, high = options.launch_us
    if not 0 < low <= high < math.inf:
        raise UsageError(f"--launch-us expects LOW and HIGH in us, 0 < LOW <= HIGH, got {low:g} {high:g}.")
    return Span(high, low)
