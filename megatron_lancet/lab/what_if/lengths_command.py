"""Arguments for documents of different lengths, and the prediction of steps of them."""

import argparse
from pathlib import Path

from megatron_lancet.cli.arguments import count, positive_float, positive_int
from megatron_lancet.data.lengths import read_lengths
from megatron_lancet.lab.what_if.document_times import (
    ColumnTimes,
    as_one_sample,
    document_cost,
    given_pair_shares,
    measured_pair_shares,
    profiled,
)
from megatron_lancet.lab.what_if.forecast import Forecaster, Planner
from megatron_lancet.lab.what_if.layout import Layout
from megatron_lancet.lab.what_if.packings import (
    Packings,
    Setting,
    documents_that_fill,
    draw,
    in_steps,
    packings,
    predict_packings,
)
from megatron_lancet.planning.documents.cost import DocumentCost
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator

_FILLED = 0.9
"""Part of the positions of a step's bins that its documents fill in the mean."""


def add_lengths_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that :func:`predicted_packings` reads."""
    add = parser.add_argument_group("what if micro-batches are documents").add_argument
    add(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="histogram of documents' lengths that preprocess_data.py wrote, or a dataset's prefix: a table over ways "
        "of packing, instead of a timeline",
    )
    filled = f"{100 * _FILLED:.0f} %% of the profile's micro-batches"  # argparse formats help with %
    add(
        "--step-documents",
        type=positive_int,
        metavar="N",
        help=f"documents of a step on each rank (default: as many as fill {filled})",
    )
    add(
        "--attention-cost",
        type=positive_float,
        metavar="RATIO",
        help="as --lancet-pack-attention-cost: cost of a position's attention to one other, in costs of a token's "
        "other work on its own rank (default: from the profile's chunks along the sequence)",
    )
    add("--steps", type=positive_int, default=20, metavar="N", help="drawn steps (default: 20)")
    add("--seed", type=count, default=0, help="of the draw (default: 0)")


def forecaster_of_documents(forecaster: Forecaster) -> Forecaster:
    """Returns what predicts steps whose micro-batches are one sample each, as bins are."""
    return Forecaster(as_one_sample(forecaster.profile), forecaster.network)


def predicted_packings(
    profile: Profile, documents: Forecaster, layout: Layout, planner: Planner, arguments: argparse.Namespace
) -> Packings:
    """Predicts steps of the documents that the flags describe.

    Args:
        profile: as measured.
        documents: of :func:`forecaster_of_documents`.

    Raises:
        UsageError: the lengths can't be read, or the profile does not say what long documents cost.
        RecordError: the profile has no times for the plan.
    """
    facts = profile.model
    histogram = in_steps(read_lengths(arguments.lengths), facts.seq_length)
    given = arguments.attention_cost
    shares = measured_pair_shares(profile) if given is None else given_pair_shares(profile, DocumentCost(given))
    positions = _FILLED * layout.num_micro_batches * facts.micro_batch_size * facts.seq_length
    setting = Setting(
        num_ranks=layout.ranks_per_stage,
        ep_size=layout.ep_size,
        num_stages=layout.pp_size,
        num_micro_batches=layout.num_micro_batches,
        num_documents=arguments.step_documents or documents_that_fill(histogram, positions),
        num_rows=facts.micro_batch_size,
        seq_length=facts.seq_length,
    )
    forecast = documents.forecast(layout, planner)
    moved = documents.moved(layout)
    prediction = Simulator(CostModel(moved)).predict(forecast.plan)
    in_slots_ms = (layout.num_micro_batches + layout.pp_size - 1) * prediction.slot_ms
    cost = document_cost(profile, shares)
    return Packings(
        plan=forecast.plan,
        setting=setting,
        mean_length=sum(length * number for length, number in histogram.items()) / sum(histogram.values()),
        cost=cost,
        num_steps=arguments.steps,
        steps=tuple(
            predict_packings(
                draw(histogram, setting, arguments.steps, arguments.seed),
                setting,
                packings(setting, cost),
                ColumnTimes(moved, forecast.plan, shares, profiled(facts)),
                forecast.step_ms - in_slots_ms,
            )
        ),
    )
