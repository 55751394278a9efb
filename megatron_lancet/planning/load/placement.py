"""Places experts on ranks: the placement of least cost for a measured load, and its file.

A placement of a layer lists the (logical) expert of each slot; the slots of a rank are neighbours, in rank order, so
that Megatron's own placement is 0, 1, 2, ... Every rank holds equally many experts.

Cost, in rows: those that the most loaded rank works on; with nodes also those that the busiest node sends to others, or
receives, per rank of it. All ranks wait for the most loaded one at each all-to-all. The search resembles common
balancers (EPLB, SmartMoE): largest first onto the emptiest rank with room, then swaps of pairs while the cost falls.

Legend: P ranks on N nodes, E experts.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lancet.files.reader import RecordError, parse_record, read_text
from megatron_lancet.planning.figures import Count
from megatron_lancet.planning.load.expert_load import LayerLoad

PLACEMENT_VERSION = 1
_MAX_SWAPS_PER_EXPERT = 8
"""More swaps gain less than a row each; the bound keeps a damaged load from running for hours."""

type Placement = tuple[int, ...]


def contiguous(num_experts: int) -> Placement:
    """Megatron's own placement."""
    return tuple(range(num_experts))


def rows_of_ranks(rows_per_expert: Sequence[float], placement: Sequence[int], ep_size: int) -> list[float]:
    """Rows that each rank works on.

    Args:
        placement: any number of slots, and any number of them for an expert, whose rows they share evenly.
    """
    per_rank = len(placement) // ep_size
    copies = [0] * len(rows_per_expert)
    for expert in placement:
        copies[expert] += 1
    shares = [rows / max(1, number) for rows, number in zip(rows_per_expert, copies, strict=True)]
    return [sum(shares[expert] for expert in placement[r * per_rank : (r + 1) * per_rank]) for r in range(ep_size)]


def rows_between_nodes(load: LayerLoad, placement: Placement, ep_size: int, ranks_per_node: int) -> float:
    """Rows of one layer whose token and expert are on different nodes."""
    return sum(_Ranks(load, placement, ep_size, ranks_per_node).received)


def cost(load: LayerLoad, placement: Placement, ep_size: int, ranks_per_node: int | None = None) -> float:
    """The cost of a placement, in rows; see the text of the module.

    Args:
        ranks_per_node: None for a single node.
    """
    return _Ranks(load, placement, ep_size, ranks_per_node).cost


def solve(load: LayerLoad, ep_size: int, ranks_per_node: int | None = None) -> Placement:
    """The placement of least cost that the search finds, the same on every machine; never worse than Megatron's.

    Experts that stay on their rank stay in their slot.

    Args:
        ep_size: P, which may differ from the load's; tokens then come evenly from all nodes.
        ranks_per_node: None for a single node.

    Raises:
        ValueError: the experts can't be spread evenly over the ranks, or the ranks over nodes.
    """
    num_experts = len(load.rows[0])
    _check_sizes(num_experts, ep_size, ranks_per_node)
    before = contiguous(num_experts)
    found = [before]
    for start in (before, _largest_first(load.rows_per_expert, ep_size)):
        ranks = _Ranks(load, start, ep_size, ranks_per_node)
        ranks.swap_while_it_helps()
        found.append(_settled(ranks.placement, before, ep_size))
    return min(found, key=lambda placement: cost(load, placement, ep_size, ranks_per_node))


class _Ranks:
    """Rows of ranks and nodes under a placement, which swaps change."""

    def __init__(self, load: LayerLoad, placement: Placement, ep_size: int, ranks_per_node: int | None) -> None:
        self._total = load.rows_per_expert
        self._slots = list(placement)
        self._per_rank = len(placement) // ep_size
        self.rows = [0] * ep_size
        for slot, expert in enumerate(placement):
            self.rows[slot // self._per_rank] += self._total[expert]
        self._ranks_per_node = ranks_per_node or ep_size
        num_nodes = ep_size // self._ranks_per_node
        self._from_node = _rows_by_node(load, ep_size, num_nodes)
        self.received = [0.0] * num_nodes
        self._sent = [float(sum(of_node)) for of_node in self._from_node]
        for slot, expert in enumerate(placement):
            self._hold(self._node(slot), expert, 1)

    @property
    def placement(self) -> Placement:
        return tuple(self._slots)

    @property
    def cost(self) -> float:
        return max(self.rows) + self._cost_of_nodes()

    def swap_while_it_helps(self) -> None:
        """Swaps the experts of two slots, the best pair first, until no swap lowers the cost.

        Of swaps of equal cost it prefers small differences of ranks: several ranks may have the most rows.
        """
        for _ in range(_MAX_SWAPS_PER_EXPERT * len(self._slots)):
            best = min(self._candidates(), default=None)
            if best is None or best[:2] >= (self.cost, 0.0):
                return
            _, _, one, other = best
            self._swap(one, other)

    def _candidates(self) -> Iterator[tuple[float, float, int, int]]:
        """Yields cost, growth of the sum of squares, and the slots of swaps that may lower the cost."""
        by_rows = sorted(range(len(self.rows)), key=lambda rank: -self.rows[rank])
        for one in self._critical_places():
            rank = one // self._per_rank
            for other in range(len(self._slots)):
                other_rank = other // self._per_rank
                moved = self._total[self._slots[one]] - self._total[self._slots[other]]
                if rank == other_rank or (moved <= 0 and len(self._sent) == 1):
                    continue
                rows, other_rows = self.rows[rank] - moved, self.rows[other_rank] + moved
                rest = next((self.rows[third] for third in by_rows[:3] if third not in (rank, other_rank)), 0)
                growth = 2 * moved * (moved + self.rows[other_rank] - self.rows[rank])
                yield max(rows, other_rows, rest) + self._cost_of_nodes_after(one, other), growth, one, other

    def _critical_places(self) -> list[int]:
        """Slots of the ranks, and of the nodes, that have most."""
        most = max(self.rows)
        ranks = {rank for rank, rows in enumerate(self.rows) if rows == most}
        if len(self._sent) > 1:
            of_nodes = [max(pair) for pair in zip(self._sent, self.received, strict=True)]
            node = of_nodes.index(max(of_nodes))
            ranks |= set(range(node * self._ranks_per_node, (node + 1) * self._ranks_per_node))
        return [slot for slot in range(len(self._slots)) if slot // self._per_rank in ranks]

    def _cost_of_nodes(self) -> float:
        return max(*self._sent, *self.received) / self._ranks_per_node if len(self._sent) > 1 else 0.0

    def _cost_of_nodes_after(self, one: int, other: int) -> float:
        if len(self._sent) == 1 or self._node(one) == self._node(other):
            return self._cost_of_nodes()
        # Sums of floats undone one by one may differ in the last bit, so the present ones are put back.
        before = self._sent[:], self.received[:]
        self._exchange(one, other)
        after = self._cost_of_nodes()
        self._sent, self.received = before
        return after

    def _swap(self, one: int, other: int) -> None:
        moved = self._total[self._slots[one]] - self._total[self._slots[other]]
        self.rows[one // self._per_rank] -= moved
        self.rows[other // self._per_rank] += moved
        self._exchange(one, other)
        self._slots[one], self._slots[other] = self._slots[other], self._slots[one]

    def _exchange(self, one: int, other: int) -> None:
        for slot, partner in ((one, other), (other, one)):
            self._hold(self._node(slot), self._slots[slot], -1)
            self._hold(self._node(slot), self._slots[partner], 1)

    def _hold(self, node: int, expert: int, sign: int) -> None:
        own = self._from_node[node][expert]
        self.received[node] += sign * (self._total[expert] - own)
        self._sent[node] -= sign * own

    def _node(self, slot: int) -> int:
        return slot // self._per_rank // self._ranks_per_node


def _rows_by_node(load: LayerLoad, ep_size: int, num_nodes: int) -> list[list[float]]:
    """Rows for each expert from each node, [N][E]."""
    if len(load.rows) != ep_size:
        return [[rows / num_nodes for rows in load.rows_per_expert]] * num_nodes
    per_node = ep_size // num_nodes
    of_nodes = [load.rows[node * per_node : (node + 1) * per_node] for node in range(num_nodes)]
    return [[float(sum(of_expert)) for of_expert in zip(*sources, strict=True)] for sources in of_nodes]


def _check_sizes(num_experts: int, ep_size: int, ranks_per_node: int | None) -> None:
    if num_experts % ep_size:
        raise ValueError(f"{num_experts} experts can't be spread evenly over {ep_size} ranks")
    if ep_size % (ranks_per_node or 1):
        raise ValueError(f"{ep_size} ranks can't be spread evenly over nodes of {ranks_per_node} ranks")


def _largest_first(rows_per_expert: Sequence[int], ep_size: int) -> Placement:
    room = [len(rows_per_expert) // ep_size] * ep_size
    rows = [0] * ep_size
    held: list[list[int]] = [[] for _ in range(ep_size)]
    for expert in sorted(range(len(rows_per_expert)), key=lambda expert: -rows_per_expert[expert]):
        rank = min((rank for rank in range(ep_size) if room[rank]), key=lambda rank: rows[rank])
        room[rank] -= 1
        rows[rank] += rows_per_expert[expert]
        held[rank].append(expert)
    return tuple(expert for of_rank in held for expert in of_rank)


def _settled(placement: Placement, before: Placement, ep_size: int) -> Placement:
    """The same experts on each rank, those that have been there in their slots, others in order."""
    per_rank = len(placement) // ep_size
    slots: list[int] = []
    for first in range(0, len(placement), per_rank):
        own, earlier = placement[first : first + per_rank], before[first : first + per_rank]
        arriving = iter(sorted(set(own) - set(earlier)))
        slots += [expert if expert in own else next(arriving) for expert in earlier]
    return tuple(slots)


@dataclass(frozen=True)
class _PlacementFile:
    layers: dict[str, tuple[Count, ...]]

    def __post_init__(self) -> None:
        for layer, experts in self.layers.items():
            if not re.fullmatch(r"[1-9][0-9]{0,5}", layer):
                raise ValueError(f"layers must have numbers from 1, found {layer[:20]!r}")
            if sorted(experts) != list(range(len(experts))):
                twice = sorted({expert for expert in experts if experts.count(expert) > 1})
                missing = sorted(set(range(len(experts))) - set(experts))
                raise ValueError(
                    f"layer {layer} must have each of its {len(experts)} experts once, found several times: "
                    f"{twice[:4]}, missing: {missing[:4]}"
                )


def placement_to_json(layers: Mapping[int, Placement]) -> str:
    """The text of a placement file, a line for each layer."""
    lines = ",\n  ".join(f'"{layer}": {json.dumps(list(layers[layer]))}' for layer in sorted(layers))
    return f'{{"version": {PLACEMENT_VERSION}, "layers": {{\n  {lines}\n}}}}\n'


def read_placement(path: Path) -> dict[int, Placement]:
    """Reads a placement file: the placement of each layer that it names.

    Raises:
        RecordError: the file can't be read, is something else, or a layer lacks an expert.
    """
    content = parse_record(_PlacementFile, read_text(path), PLACEMENT_VERSION, "the placement", str(path))
    if not content.layers:
        raise RecordError(f"{path}: it places the experts of no layer")
    return {int(layer): experts for layer, experts in sorted(content.layers.items(), key=lambda item: int(item[0]))}
