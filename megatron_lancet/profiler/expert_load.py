"""Measures the load of experts from the counts that ranks exchange anyway; nothing is sent in a step for it.

Legend of shapes: P ranks of the expert-parallel group, V ranks that hold the parts of the same experts, e local
experts.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.core import parallel_state

from megatron_lancet.model.gpt import LanguageModel, overlapping_layers
from megatron_lancet.planning.load.expert_load import ExpertLoad, LayerLoad
from megatron_lancet.runtime.collectives import from_all_ranks

type RowsByLayer = Mapping[int, Sequence[Sequence[int]]]
"""Rows for each local expert from each source, [P][e], by layer."""


class ExpertRows:
    """Rows for the experts of this rank since the last :meth:`take`."""

    def __init__(self, expert_tp_size: int) -> None:
        """
        Args:
            expert_tp_size: V.
        """
        self._expert_tp_size = expert_tp_size
        self._rows: dict[int, list[list[int]]] = {}

    def add(self, layer: int, received: Sequence[Sequence[int]]) -> None:
        """Adds the counts of one exchange, [P * V][e]: the V ranks that hold the same experts are neighbours."""
        if layer not in self._rows:
            self._rows[layer] = [[0] * len(of_peer) for of_peer in received[:: self._expert_tp_size]]
        totals = self._rows[layer]
        for peer, of_peer in enumerate(received):
            total = totals[peer // self._expert_tp_size]
            for expert, rows in enumerate(of_peer):
                total[expert] += rows

    def take(self) -> RowsByLayer:
        """Returns the sums, and begins anew."""
        rows, self._rows = self._rows, {}
        return rows

    def take_by(self, owners: Mapping[int, int]) -> RowsByLayer:
        """As :meth:`take`, with the rows of all numbers of a repeated layer under its first one.

        Args:
            owners: first number of the layer with each number.
        """
        summed = ExpertRows(expert_tp_size=1)
        for layer, rows in self.take().items():
            summed.add(owners[layer], rows)
        return summed.take()


class RankLoad(NamedTuple):
    """The load that one rank has seen.

    Attributes:
        place: its rank in its expert-parallel group.
        is_counted: False for all but one of the ranks that hold the parts of the same experts.
        experts: logical number of each local expert, by layer.
    """

    place: int
    is_counted: bool
    experts: Mapping[int, Sequence[int]]
    rows: RowsByLayer


def load_of(ranks: Sequence[RankLoad], ep_size: int, num_steps: int, num_layers: int) -> ExpertLoad | None:
    """Sums the load of all groups; None where no counts were exchanged, or in a mocked world, where one rank exists.

    Args:
        ranks: of the world.
    """
    counted = [rank for rank in ranks if rank.is_counted and rank.rows]
    if {rank.place for rank in counted} != set(range(ep_size)):
        return None
    totals: defaultdict[int, defaultdict[tuple[int, int], int]] = defaultdict(lambda: defaultdict(int))
    for rank in counted:
        for layer, of_layer in rank.rows.items():
            for source, of_source in enumerate(of_layer):
                for expert, rows in zip(rank.experts[layer], of_source, strict=True):
                    totals[layer][source, expert] += rows
    layers = []
    for layer, of_pairs in sorted(totals.items()):
        num_experts = 1 + max(expert for _, expert in of_pairs)
        rows_of = tuple(tuple(of_pairs[source, one] for one in range(num_experts)) for source in range(ep_size))
        layers.append(LayerLoad(layer, rows_of))
    return ExpertLoad(num_steps, num_layers, tuple(layers))


def gathered_load(stages: Sequence[LanguageModel], own: ExpertRows, num_steps: int) -> ExpertLoad | None:
    """Takes the load of all ranks. Collective over all ranks of the world; see :func:`load_of`.

    Args:
        stages: this rank's pipeline stages.
        num_steps: steps since the last call.
    """
    with_experts = [layer.moe for stage in stages for layer in overlapping_layers(stage) if layer.moe is not None]
    first_number: dict[object, int] = {}
    owners = {moe.number: first_number.setdefault(moe.stock, moe.number) for moe in with_experts}
    rank = RankLoad(
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank() == 0,
        {moe.number: moe.local_experts for moe in with_experts},
        own.take_by(owners),
    )
    ep_size = parallel_state.get_expert_model_parallel_world_size()
    return load_of(from_all_ranks(rank), ep_size, num_steps, stages[0].config.num_layers)
