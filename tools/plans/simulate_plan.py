r"""Predicts a step from a profile: its timeline, or a table over layouts.

By default: the timeline of one plan, in the profiled layout or in the layout of the flags.
With --world-sizes, or several --ep-size: one line per layout, for no overlap, two chunks everywhere, and a plan.

  lancet plan simulate profile.json                        make a plan, show its timeline
  lancet plan simulate profile.json plan.json --spans      a plan's timeline, op by op
  lancet plan simulate profile.json --world-sizes 8 64 512 4096 --ep-size grow --ranks-per-node 8 \
      --intra-gbps 3600 --inter-gbps 400 --picture sizes.png
  lancet plan simulate profile.json --ep-size 2 4 8        choose the number of experts per rank

docs/planner.md explains the computation and its limits.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_lancet.cli.arguments import positive_int
from megatron_lancet.cli.planning import (
    add_limit_arguments,
    check_outputs,
    fitting_plan,
    limits_of,
    load_plan,
    load_profile,
)
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.files.reader import RecordError
from megatron_lancet.files.records import to_plain
from megatron_lancet.lab.views import text
from megatron_lancet.lab.what_if import table as what_if_table
from megatron_lancet.lab.what_if.arguments import (
    add_network_arguments,
    add_reduction_arguments,
    add_routing_argument,
    network_of,
    reduced_as_asked,
)
from megatron_lancet.lab.what_if.forecast import (
    Forecaster,
    Planner,
    SweepRow,
    largest_ep_size,
    no_overlap,
    sweep,
    two_chunks,
)
from megatron_lancet.lab.what_if.layout import Layout, why_not_several_nodes
from megatron_lancet.planning.dispatch import with_dispatch
from megatron_lancet.planning.plan_file import made_for, misfits
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.simulator import Simulation, simulate
from megatron_lancet.planning.stages import split_at_stages
from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.plan import Plan

_GROW = "grow"
_NUM_SHOWN_IN_PAIRS = 4
_NUM_WAITS = 8


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, metavar="PROFILE", help="profile from lancet plan profile")
    parser.add_argument("plan_file", type=Path, nargs="?", metavar="PLAN", help="plan file from lancet plan make")
    parser.add_argument(
        "--plan",
        choices=("auto", "two-chunks", "no-overlap"),
        help="instead of PLAN; auto makes a plan, for each line of a table (default: auto)",
    )
    parser.add_argument("--spans", action="store_true", help="list every op of the timeline")
    parser.add_argument("--format", choices=("text", "markdown", "json"), default="text", help="(default: text)")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write everything as JSON")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="also draw step time and exposed share over --world-sizes"
    )
    parser.add_argument(
        "--each-dispatch",
        action="store_true",
        help="in a table over layouts: also the step of a plan with each dispatch, - where it is impossible",
    )
    _add_layout_arguments(parser)
    add_reduction_arguments(parser)
    add_limit_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.plan_file is not None and arguments.plan is not None:
        parser.error(f"give PLAN or --plan {arguments.plan}, not both")
    is_table = _is_table(arguments)
    if arguments.picture is not None and (arguments.world_sizes is None or len(arguments.ep_size) > 1):
        parser.error("--picture draws over cluster sizes: pass --world-sizes, and at most one --ep-size")
    if arguments.spans and is_table:
        parser.error("--spans belongs to one timeline: drop it, or --world-sizes and all but one --ep-size")
    if arguments.each_dispatch:
        if not is_table:
            parser.error("--each-dispatch adds columns to a table: pass --world-sizes or several --ep-size too")
        if arguments.plan_file is not None or arguments.plan not in (None, "auto") or arguments.dispatch != "auto":
            parser.error("--each-dispatch makes a plan for each dispatch: drop PLAN, --plan or --dispatch")
    return arguments


def _add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what if (default: as profiled)")
    group.add_argument("--world-sizes", nargs="+", type=positive_int, metavar="N", help="numbers of ranks: a table")
    group.add_argument(
        "--ep-size",
        nargs="+",
        type=_ep_size,
        default=[],
        metavar=f"{{N,{_GROW}}}",
        help=f"ranks that share the experts, or {_GROW}: the most that each cluster size allows; several: a table",
    )
    group.add_argument("--pp-size", type=positive_int, metavar="N", help="pipeline stages")
    group.add_argument(
        "--num-micro-batches", type=positive_int, metavar="N", help="micro-batches of a step on each pipeline"
    )
    add_network_arguments(group)
    add_routing_argument(group)


def _ep_size(text: str) -> int | str:
    return text if text == _GROW else positive_int(text)


def _is_table(arguments: argparse.Namespace) -> bool:
    return arguments.world_sizes is not None or len(arguments.ep_size) > 1


def layouts_of(forecaster: Forecaster, arguments: argparse.Namespace) -> list[Layout]:
    """Returns the layouts of a table: each number of ranks with each EP size.

    Raises:
        UsageError: the sizes don't fit together.
    """
    world_sizes = sorted(set(arguments.world_sizes or [forecaster.profile.model.world_size]))
    # dict.fromkeys removes repeated sizes and keeps the user's order.
    ep_sizes = list(dict.fromkeys(arguments.ep_size or [forecaster.profile.model.ep_size]))
    return [layout_of(forecaster, arguments, ranks, ep_size) for ranks in world_sizes for ep_size in ep_sizes]


def layout_of(
    forecaster: Forecaster, arguments: argparse.Namespace, world_size: int | None, ep_size: int | str
) -> Layout:
    """Returns the layout for a number of ranks and an EP size.

    Args:
        world_size: None is the profiled number, or the least that the other sizes need.

    Raises:
        UsageError: the sizes don't fit together.
    """
    facts = forecaster.profile.model
    pp_size = arguments.pp_size or len(set(facts.stage_of_layer))
    if world_size is None:
        least = pp_size * facts.expert_tp_size * (1 if isinstance(ep_size, str) else ep_size)
        world_size = facts.world_size if facts.world_size % least == 0 else least
    if isinstance(ep_size, str):
        ep_size = largest_ep_size(facts, max(1, world_size // pp_size))
    layout = forecaster.layout(world_size, ep_size, pp_size, arguments.num_micro_batches, arguments.routing)
    dispatch = Dispatch.known().get(arguments.dispatch)
    needs_nodes = dispatch is not None and dispatch.needs_nodes
    if needs_nodes and (why_not := why_not_several_nodes(facts, layout)) is not None:
        raise UsageError(
            f"--dispatch {dispatch} is not possible with {world_size} ranks: {why_not}. Pass "
            "--ranks-per-node and a network, or another dispatch"
        )
    return layout


def one_layout(forecaster: Forecaster, arguments: argparse.Namespace) -> Layout:
    """Returns the layout of a timeline, with the profiled number of ranks or the least that the sizes need.

    Raises:
        UsageError: the sizes don't fit together.
    """
    [ep_size] = arguments.ep_size or [forecaster.profile.model.ep_size]
    return layout_of(forecaster, arguments, None, ep_size)


def planners_of(arguments: argparse.Namespace, profile: Profile) -> dict[str, Planner]:
    """Returns the requested plan by name; prints in what it does not fit the profile.

    A plan that is not made here has the dispatch that is asked for; with ``auto`` it keeps its own.
    """

    def as_asked(plan: Plan) -> Plan:
        if arguments.dispatch == "auto":
            return plan
        return with_dispatch(plan, Dispatch.known()[arguments.dispatch])

    if arguments.plan_file is not None:
        content = load_plan(arguments.plan_file)
        plan = as_asked(content.plan)
        for difference in misfits(content, made_for(profile.model)):
            print(f"note: {difference.replace('in the run', 'in the profile')}", file=sys.stderr)
        return {arguments.plan_file.name: lambda profile: plan}
    if arguments.plan == "two-chunks":
        return {"two chunks": lambda profile: as_asked(two_chunks(profile))}
    if arguments.plan == "no-overlap":
        return {"no overlap": lambda profile: as_asked(no_overlap(profile))}
    limits = limits_of(arguments)
    return {"planned": lambda profile: fitting_plan(profile, limits).plan}


def planner_of(arguments: argparse.Namespace) -> Callable[[Dispatch], Planner]:
    """Returns what makes a plan with a dispatch."""
    limits = limits_of(arguments)

    def planner(dispatch: Dispatch) -> Planner:
        only = dataclasses.replace(limits, dispatches=(dispatch,))
        return lambda profile: fitting_plan(profile, only).plan

    return planner


def show_table(forecaster: Forecaster, arguments: argparse.Namespace) -> None:
    """Predicts and prints one line per layout."""
    layouts = layouts_of(forecaster, arguments)
    planners = {"no overlap": no_overlap, "two chunks": two_chunks} | planners_of(arguments, forecaster.profile)
    rows = list(sweep(forecaster, layouts, planners, planner_of(arguments) if arguments.each_dispatch else None))
    plain = {**_origin(forecaster.profile), "routing": str(arguments.routing), "rows": what_if_table.as_plain(rows)}
    if arguments.format == "json":
        print(json.dumps(plain, indent=1))
    else:
        print(what_if_table.as_text(rows) if arguments.format == "text" else what_if_table.as_markdown(rows))
    if arguments.output is not None:
        atomic_write(arguments.output, json.dumps(plain, indent=1) + "\n")
    if arguments.picture is not None:
        _draw(rows, forecaster.profile, arguments)


def _draw(rows: Sequence[SweepRow], profile: Profile, arguments: argparse.Namespace) -> None:
    from megatron_lancet.lab.what_if import picture as what_if_picture

    title = f"{profile.model.name}: predicted from a profile on {profile.device}, routing {arguments.routing}"
    what_if_picture.write_png(rows, title, arguments.picture)


def show_timeline(forecaster: Forecaster, arguments: argparse.Namespace) -> None:
    """Predicts and prints one step."""
    layout = one_layout(forecaster, arguments)
    [(name, planner)] = planners_of(arguments, forecaster.profile).items()
    moved = forecaster.moved(layout)
    plan = split_at_stages(planner(moved), moved.model.stage_of_layer)
    forecast = forecaster.forecast(layout, lambda profile: plan)
    # One micro-batch is enough, or one pair between two others: all are alike, and a step may have hundreds.
    num_shown = min(moved.model.num_micro_batches, _NUM_SHOWN_IN_PAIRS) if plan.is_paired else 1
    shown = dataclasses.replace(moved.model, num_micro_batches=num_shown)
    simulation = simulate(dataclasses.replace(moved, model=shown), plan)
    plain = {
        **_origin(forecaster.profile),
        "plan": to_plain(plan),
        "step_ms": forecast.step_ms,
        "exposed_ms": forecast.exposed_ms,
        "bubble_ms": forecast.bubble_ms,
        "gradient_ms": forecast.gradient_ms,
        "peak_bytes": forecast.peak_bytes,
        "timelines": to_plain(simulation.timelines),
    }
    if arguments.format == "json":
        print(json.dumps(plain, indent=1))
    else:
        print(f"profile: {forecaster.profile.model.name} on {forecaster.profile.device}")
        print(f"plan ({name}): {plan}")
        waiting = "" if moved.gradients is None else f", waiting for gradients {forecast.gradient_ms:.1f} ms"
        print(
            f"step {forecast.step_ms:.1f} ms, of it exposed {forecast.exposed_ms:.1f} ms "
            f"({100 * forecast.exposed_share:.1f} %), pipeline bubble {forecast.bubble_ms:.1f} ms{waiting}; "
            f"activations and deferred dW {forecast.peak_bytes / 1e6:.0f} MB"
        )
        print_timelines(simulation, arguments.spans, num_shown)
    if arguments.output is not None:
        atomic_write(arguments.output, json.dumps(plain, indent=1) + "\n")


def print_timelines(simulation: Simulation, spans: bool, num_shown: int) -> None:
    """Prints the lanes of each simulated rank in one or a few micro-batches, and its longest waits."""
    until_ms = max(span.end_ms for timeline in simulation.timelines for span in timeline.spans)
    shown = "one micro-batch" if num_shown == 1 else f"{num_shown} micro-batches"
    print(f"\n{shown}, {until_ms:.1f} ms; # busy, + partly, . a little:")
    for timeline, num_alike in zip(simulation.timelines, simulation.same_ranks, strict=True):
        alike = f", and {num_alike - 1} more that receive as much" if num_alike > 1 else ""
        print(f"\nrank {timeline.rank}{alike}: exposed {timeline.exposed_ms():.1f} ms")
        print("\n".join(text.lanes(timeline, until_ms)))
        waits = text.longest_waits(timeline, _NUM_WAITS)
        if waits:
            print("longest waits:")
            print("\n".join(waits))
        if spans:
            print("from ms, to ms, lane, op:")
            print("\n".join(text.all_spans(timeline)))


def _origin(profile: Profile) -> dict[str, object]:
    return {"profile": profile.model.name, "device": profile.device, "versions": profile.versions}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    arguments = parse_arguments(argv)
    check_outputs(arguments.output, arguments.picture)
    forecaster = Forecaster(reduced_as_asked(load_profile(arguments.profile), arguments), network_of(arguments))
    try:
        if _is_table(arguments):
            show_table(forecaster, arguments)
        else:
            show_timeline(forecaster, arguments)
    except RecordError as error:
        raise UsageError(str(error)) from error


if __name__ == "__main__":
    run_command(main)
