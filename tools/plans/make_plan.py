"""Makes a plan from a profile and prints its predicted effect.

  lancet plan make profile.json --output plan.json
  lancet plan make profile.json --output plan.json --max-memory-mb 20000 --num-chunks 1 2 4
  lancet plan make profile.json --output plan.json --ep-size 4

Use the plan with pretrain_gpt_moe.py --lancet-plan plan.json. The same profile and flags give the same plan.
lancet plan explain explains it.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_lancet.cli.arguments import positive_int
from megatron_lancet.cli.planning import add_limit_arguments, check_outputs, fitting_plan, limits_of, load_profile
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.plan_text.explanation_text import short_text
from megatron_lancet.lab.what_if.arguments import (
    add_network_arguments,
    add_reduction_arguments,
    network_of,
    reduced_as_asked,
)
from megatron_lancet.lab.what_if.forecast import Forecaster, NetworkChoice
from megatron_lancet.planning.plan_file import PlanFile, write_plan_file
from megatron_lancet.planning.plan_record import record_of
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.planner import PlannedStep

_NUM_ALTERNATIVES = 5


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, metavar="PROFILE", help="profile from lancet plan profile")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="PLAN", help="plan file to write, in an existing folder"
    )
    parser.add_argument(
        "--alternatives",
        type=int,
        default=_NUM_ALTERNATIVES,
        metavar="N",
        help=f"number of other plans to list (default: {_NUM_ALTERNATIVES})",
    )
    group = parser.add_argument_group("for another layout or network (default: as profiled)")
    group.add_argument(
        "--ep-size",
        type=_ep_size,
        metavar="N",
        help="ranks that share the experts, at least 2; lancet plan simulate --ep-size 2 4 8 compares sizes",
    )
    add_network_arguments(group)
    add_reduction_arguments(parser)
    add_limit_arguments(parser)
    return parser.parse_args(argv)


def _ep_size(text: str) -> int:
    size = positive_int(text)
    if size == 1:
        raise argparse.ArgumentTypeError("with one rank there is no all-to-all, and a run needs no plan")
    return size


def moved_profile(profile: Profile, arguments: argparse.Namespace) -> Profile:
    """Returns the profile for the layout and network of the flags.

    Raises:
        UsageError: the layout is impossible.
    """
    forecaster = Forecaster(profile, network_of(arguments))
    if arguments.ep_size is None and forecaster.network == NetworkChoice():
        return profile
    return forecaster.moved(forecaster.layout(profile.model.world_size, arguments.ep_size))


def print_result(planned: PlannedStep, content: PlanFile, num_alternatives: int) -> None:
    """Prints the plan, its prediction, and the alternatives."""
    expected = content.prediction
    assert expected is not None
    print(f"plan: {planned.plan}")
    if planned.plan.gaps:
        num_placed = sum(len(gap.weight_grads) for gap in planned.plan.gaps)
        print(f"      {num_placed} weight gradients are placed in {len(planned.plan.gaps)} gaps")
    print(
        f"step: {expected.step_ms:.1f} ms predicted, {expected.no_overlap_step_ms:.1f} ms without overlap "
        f"({expected.no_overlap_step_ms / expected.step_ms:.2f}x); exposed all-to-all {expected.exposed_ms:.1f} ms"
    )
    print(
        f"memory: {expected.peak_bytes / 1e6:.0f} MB of activations and deferred weight gradients "
        f"({expected.peak_dw_bytes / 1e6:.0f} MB of it)"
    )
    others = {f"{one.prediction.step_ms:10.1f} ms  {short_text(one.plan)}": one for one in planned.alternatives}
    others = {line: one for line, one in others.items() if short_text(one.plan) != short_text(planned.plan)}
    if others and num_alternatives > 0:
        print("alternatives:")
        if min(one.prediction.step_ms for one in planned.alternatives) < expected.step_ms:
            ours_ms = planned.alternatives[0].prediction.step_ms
            print(
                f"  (by a simpler prediction, with similar ranks merged and the same routing in all layers; "
                f"the plan takes {ours_ms:.1f} ms by it)"
            )
    for line, one in list(others.items())[: max(0, num_alternatives)]:
        print(f"{line}" + ("" if one.fits else "  (does not fit into memory)"))
    for exclusion in planned.excluded:
        if not exclusion.is_evident:
            print(f"not considered: {exclusion.what}: {exclusion.reason}")
    if planned.warning:
        print(f"note: {planned.warning}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    start_s = time.monotonic()
    arguments = parse_arguments(argv)
    check_outputs(arguments.output)
    profile = reduced_as_asked(load_profile(arguments.profile), arguments)
    limits = limits_of(arguments)
    try:
        profile = moved_profile(profile, arguments)
        planned = fitting_plan(profile, limits)
        content = record_of(profile, planned.plan)
    except RecordError as error:
        raise UsageError(f"no plan from {arguments.profile}: {error}") from error
    try:
        write_plan_file(arguments.output, content)
    except OSError as error:
        raise UsageError(f"can't write {arguments.output}: {error.strerror or error}") from error
    print_result(planned, content, arguments.alternatives)
    searched = "all plans of the space" if planned.is_exact else f"{planned.num_simulated} plans simulated"
    print(f"{arguments.output} written; {searched}, {time.monotonic() - start_s:.1f} s")


if __name__ == "__main__":
    run_command(main)
