"""Whether experts are to change their ranks in a run: what a swap gains, against noise and what it costs.

The window of steps has two halves. Swaps are chosen by the load of the first one, and their gain is what they would
have gained in the second: a load that does not last gains nothing there.

A step's gain is taken from the time that its compute waited for all-to-alls, by the share of rows that the most loaded
rank loses. Those waits hold the wire's time and the time of ranks which wait for the most loaded one; the experts' own
time on that rank is not counted, so that the gain is a cautious figure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lancet.planning.load.expert_load import ExpertLoad
from megatron_lancet.planning.load.placement import Placement, cost, most_over_mean, rows_of_ranks, swapped, swaps_of

type Swaps = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Costs:
    """Figures of a run, the same on all ranks.

    Attributes:
        exposed_ms: time that compute waited for all-to-alls in a step, mean over ranks.
        noise_ms: what two step times must differ by to count as different.
        expert_bytes: weights, main copies and moments of one expert.
        ms_per_byte: of a message between two ranks.
        num_steps: steps before experts may move again.
    """

    exposed_ms: float
    noise_ms: float
    expert_bytes: int
    ms_per_byte: float
    num_steps: int


@dataclass(frozen=True)
class Rebalance:
    """Swaps, and what they are expected to do.

    Attributes:
        swaps: pairs of slots, one after the other, by layer; empty if nothing is to move.
        before: most loaded rank over mean in the second half, mean over the layers that change.
        after: the same with the swaps.
        gain_ms: of a step.
        move_ms: that moving takes, once.
    """

    swaps: Mapping[int, Swaps]
    before: float = 1.0
    after: float = 1.0
    gain_ms: float = 0.0
    move_ms: float = 0.0


STAY = Rebalance({})


def decide(
    first: ExpertLoad,
    second: ExpertLoad,
    placements: Mapping[int, Placement],
    costs: Costs,
    ranks_per_node: int | None = None,
) -> Rebalance:
    """Chooses the swaps that pay, layer by layer; none if all together gain less than the noise.

    Args:
        first: load of the first half of the window.
        second: the same of the second half.
        placements: the present one of each layer.
        ranks_per_node: None for a single node.
    """
    ep_size = second.ep_size
    later = {layer.layer: layer for layer in second.layers}
    total = sum(cost(layer, placements[number], ep_size, ranks_per_node) for number, layer in later.items())
    swaps: dict[int, Swaps] = {}
    gain_ms = move_ms = 0.0
    ratios: list[tuple[float, float]] = []
    for layer in first.layers:
        number, now = layer.layer, placements[layer.layer]
        if number not in later or total == 0:
            continue
        found = swaps_of(layer, now, ep_size, ranks_per_node)
        then = swapped(now, found)
        rows = [cost(later[number], one, ep_size, ranks_per_node) for one in (now, then)]
        its_gain_ms = costs.exposed_ms * (rows[0] - rows[1]) / total
        its_move_ms = most_sent(now, then, ep_size) * costs.expert_bytes * costs.ms_per_byte
        if found and its_gain_ms > 0 and its_gain_ms * costs.num_steps > its_move_ms:
            swaps[number] = tuple(found)
            gain_ms += its_gain_ms
            move_ms += its_move_ms
            by_rank = [rows_of_ranks(later[number].rows_per_expert, one, ep_size) for one in (now, then)]
            ratios.append((most_over_mean(by_rank[0]), most_over_mean(by_rank[1])))
    if gain_ms <= costs.noise_ms or not swaps:
        return STAY
    before, after = (sum(values) / len(ratios) for values in zip(*ratios, strict=True))
    return Rebalance(swaps, before, after, gain_ms, move_ms)


def most_sent(now: Placement, then: Placement, ep_size: int) -> int:
    """Most experts that a rank sends to others when one placement becomes another."""
    per_rank = len(now) // ep_size
    rank_of = {expert: slot // per_rank for slot, expert in enumerate(then)}
    sent = [0] * ep_size
    for slot, expert in enumerate(now):
        sent[slot // per_rank] += rank_of[expert] != slot // per_rank
    return max(sent)
