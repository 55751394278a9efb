"""Explains a plan, layer by layer, and the communication that stays exposed.

  lancet plan explain plan.json                            the content of the file
  lancet plan explain plan.json --profile profile.json     also the reasons for exposed messages, and other plans

Layers with the same treatment share a paragraph.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_lancet.cli.planning import load_plan, load_profile
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.plan_text.explanation_text import (
    dispatch_line,
    each_layer,
    layer_lines,
    pairing_line,
    reason_lines,
    short_text,
)
from megatron_lancet.lab.plan_text.plan_text import LEGEND, head_lines, plan_lines
from megatron_lancet.lab.what_if.cluster import fitted_level
from megatron_lancet.planning.explain import explain
from megatron_lancet.planning.plan_file import PlanFile, check_fits, made_for
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.planner import make_plan

_NUM_ALTERNATIVES = 5
_OTHER_NETWORK = 0.01
"""Predictions that differ by more than this part are not of the same network and layout."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan_file", type=Path, metavar="PLAN", help="plan file from lancet plan make")
    parser.add_argument("--profile", type=Path, metavar="PROFILE", help="profile of the plan's model")
    parser.add_argument("--all-layers", action="store_true", help="with --profile: one paragraph per layer")
    arguments = parser.parse_args(argv)
    if arguments.all_layers and arguments.profile is None:
        parser.error("--all-layers needs --profile")
    return arguments


def network_line(profile: Profile) -> str:
    """The network that the prediction assumes: there are no flags for another."""
    level = fitted_level(profile.link, profile.model.ep_size)
    speed = "" if level is None else f": a rank sends at {level.gbps:.3g} Gb/s, latency {level.latency_us:.3g} us"
    return f"network: as profiled{speed}"


def print_reasons(content: PlanFile, profile: Profile, all_layers: bool) -> None:
    """Prints the prediction, the reasons for exposed messages, and other plans.

    Raises:
        RecordError: the profile lacks an op of the plan.
    """
    planned = make_plan(profile)
    explanation = explain(profile, content.plan, planned)
    step = explanation.prediction
    beside = "" if planned.no_overlap is None else f" ({planned.no_overlap.step_ms:.1f} ms without overlap)"
    print(f"predicted: step {step.step_ms:.1f} ms{beside}, exposed {step.exposed_ms:.1f} ms")
    print(
        f"           {step.peak_bytes / 1e6:.0f} MB of activations and deferred weight gradients "
        f"({step.peak_dw_bytes / 1e6:.0f} MB of it)"
    )
    print(network_line(profile))
    if content.prediction is not None and abs(content.prediction.step_ms / step.step_ms - 1) > _OTHER_NETWORK:
        print(
            f"note: the plan file predicts {content.prediction.step_ms:.1f} ms, so it was made for another network or "
            "layout, or from another profile: lancet plan simulate PROFILE PLAN has flags for these"
        )
    print(pairing_line(explanation))
    print(dispatch_line(explanation))
    print("\nlayers, on the rank that waits longest, times of one micro-batch:")
    lines = list(each_layer(explanation) if all_layers else layer_lines(explanation))
    print("\n".join(lines))
    if any("[+" in line or "[-" in line for line in lines):
        print(LEGEND)
    reasons = list(reason_lines(explanation))
    if reasons:
        print("\nexposed because of:")
        print("\n".join(reasons))
    print("\nother plans for this profile:")
    seen = {short_text(content.plan)}
    for one in planned.alternatives:
        text = short_text(one.plan)
        if text not in seen and len(seen) <= _NUM_ALTERNATIVES:
            seen.add(text)
            print(f"{one.prediction.step_ms:10.1f} ms  {text}")
    for exclusion in explanation.excluded:
        print(f"not considered: {exclusion.what}: {exclusion.reason}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    arguments = parse_arguments(argv)
    content = load_plan(arguments.plan_file)
    print("\n".join(head_lines(content)))
    if arguments.profile is None:
        print("\n".join(plan_lines(content)))
        return
    profile = load_profile(arguments.profile)
    try:
        check_fits(content, made_for(profile.model), str(arguments.plan_file))
        print_reasons(content, profile, arguments.all_layers)
    except RecordError as error:
        raise UsageError(str(error)) from error


if __name__ == "__main__":
    run_command(main)
