"""Which experts ``lancet evaluate --replicas`` copies, and where to: by a measured popularity."""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.files.reader import RecordError
from megatron_lancet.inference.evaluate import TokenStream
from megatron_lancet.inference.load import LoadedModel, number_of_ranks
from megatron_lancet.inference.replicas import FLAG, Replicas, make_replicas, moe_layers
from megatron_lancet.inference.routing import measured_popularity
from megatron_lancet.planning.load.expert_load import read_expert_load
from megatron_lancet.planning.load.popularity import most_over_mean
from megatron_lancet.planning.load.replicas import (
    ExpertHolders,
    RowsOfRanks,
    choose_holders,
    rows_of_ranks,
    why_not_replicas,
)
from megatron_lancet.training.platform.launcher import ranks_per_node

POPULARITY_FLAG = "--popularity"

type Popularity = Mapping[int, Sequence[int]]
"""Rows of each expert by layer number."""


@dataclass(frozen=True)
class Expected:
    """Where rows are expected to go, medians over layers.

    Attributes:
        most_over_mean: rows of the fullest rank over the mean.
        sent_share: share of the rows that leave their rank.
    """

    most_over_mean: float
    sent_share: float


@dataclass(frozen=True)
class ChosenReplicas:
    """Replicas of a loaded model, and what is expected of them.

    Attributes:
        replicas: off until they are made active.
        before: what is expected without replicas, if all ranks have tokens of the measured popularity.
        after: the same with replicas.
    """

    replicas: Replicas
    before: Expected
    after: Expected


@dataclass(frozen=True)
class ReplicaWish:
    """What a user asks for, checked as far as it can be before ranks are connected.

    Attributes:
        number: of replicas in each layer.
        popularity: from a file; None to measure it.
        ranks_per_node: None where it is unknown.
    """

    number: int
    popularity: Popularity | None
    ranks_per_node: int | None

    @staticmethod
    def of(args: argparse.Namespace, number: int, popularity: Path | None) -> "ReplicaWish":
        """
        Args:
            args: of the run that wrote the checkpoint.
            popularity: file with a measured load; None to measure it.

        Raises:
            UsageError: the model can't have such replicas, or the file is not one of its loads.
        """
        num_ranks = number_of_ranks()
        check_replicas(args, number, num_ranks)
        here = argparse.Namespace(world_size=num_ranks, distributed_backend="")
        known = None if popularity is None else read_popularity(popularity, args.num_experts)
        return ReplicaWish(number, known, ranks_per_node(here, LancetConfig()))

    def granted(
        self, model: LoadedModel, stream: TokenStream, batch_size: int, max_tokens: int | None
    ) -> ChosenReplicas:
        """Choose and copy the experts. Collective: all ranks with the same arguments.

        Args:
            stream: whose popularity of experts is measured where no file has it.
            batch_size: of the measurement, windows that a rank computes at once.
            max_tokens: of the stream, from the first on; None for all.

        Raises:
            UsageError: the popularity is another model's, or the experts can't be copied.
        """
        popularity = self.popularity or measured_popularity(model, stream, batch_size, max_tokens)
        holders = choose_for(model, popularity, self.number)
        replicas = make_replicas(model, holders, self.ranks_per_node)
        return ChosenReplicas(replicas, *expected_rows(popularity, holders, self.ranks_per_node))


def check_replicas(args: argparse.Namespace, num_replicas: int, num_ranks: int) -> None:
    """Check, before ranks are connected, that a checkpoint's layers can have replicas.

    Args:
        args: of the run that wrote the checkpoint.

    Raises:
        UsageError: they can't.
    """
    if not args.num_experts:
        raise UsageError(f"{FLAG} {num_replicas} is for a model with experts, and this checkpoint has none. Drop it.")
    why_not = why_not_replicas(num_replicas, args.num_experts, num_ranks)
    if why_not is not None:
        raise UsageError(f"{FLAG} {num_replicas} is not possible: {why_not}.")
    if args.moe_expert_capacity_factor is not None:
        raise UsageError(
            f"{FLAG} {num_replicas} does not work with --moe-expert-capacity-factor: a capacity belongs to an "
            "expert, not to a replica. Drop the replicas."
        )


def choose_for(model: LoadedModel, popularity: Popularity, num_replicas: int) -> dict[int, ExpertHolders]:
    """Which ranks are to hold each expert, by layer number.

    Args:
        popularity: of the layers that have experts, and perhaps of others.

    Raises:
        UsageError: the popularity is another model's.
    """
    numbers = [moe.layer_number for moe in moe_layers(model)]
    missing = [number for number in numbers if number not in popularity]
    if missing:
        raise UsageError(
            f"{POPULARITY_FLAG}: there is no load of layer {missing[0]}; the checkpoint's layers with experts are "
            f"{', '.join(map(str, numbers))}. Pass a load that was measured with this model."
        )
    return {number: choose_holders(popularity[number], model.num_ranks, num_replicas) for number in numbers}


def expected_rows(
    popularity: Popularity, holders: Mapping[int, ExpertHolders], ranks_per_node: int | None
) -> tuple[Expected, Expected]:
    """Where rows are expected to go without and with replicas, if all ranks have tokens of the given popularity.

    Args:
        popularity: of the layers that have holders.
        holders: by layer number.
        ranks_per_node: None where it is unknown.
    """
    found: tuple[list[RowsOfRanks], list[RowsOfRanks]] = ([], [])
    for number, its_holders in holders.items():
        rows = [popularity[number]] * its_holders.num_ranks
        alone = ExpertHolders(its_holders.num_experts, ((),) * its_holders.num_ranks)
        for one, in_layers in zip((alone, its_holders), found, strict=True):
            in_layers.append(rows_of_ranks(rows, one, ranks_per_node))
    before, after = (
        Expected(
            statistics.median(most_over_mean(layer.computed) for layer in in_layers),
            statistics.median(layer.sent / max(1, sum(layer.computed)) for layer in in_layers),
        )
        for in_layers in found
    )
    return before, after


def read_popularity(path: Path, num_experts: int) -> dict[int, tuple[int, ...]]:
    """Rows of each expert by layer number, from a file with a measured load.

    Args:
        num_experts: of a layer of the model.

    Raises:
        UsageError: the file can't be read, or is the load of another model.
    """
    try:
        load = read_expert_load(path)
    except RecordError as error:
        raise UsageError(f"{POPULARITY_FLAG}: {error}") from error
    if load.num_experts != num_experts:
        raise UsageError(
            f"{POPULARITY_FLAG}: {path} is the load of {load.num_experts} experts, and the checkpoint's layers have "
            f"{num_experts}. Pass a load that was measured with this model."
        )
    return {layer.layer: layer.rows_per_expert for layer in load.layers}
