"""The host of a simulated rank on a device: when does it get to the launch of a message that waits for token counts?"""

from collections.abc import Sequence

from megatron_lancet.planning.simulation.lowering import BESIDE, Step, counts_key, key_of
from megatron_lancet.planning.simulation.rank_state import RankState
from megatron_lancet.schedule.turns import Compute, Launch, LaunchCounts, Wait


def launched_after_ms(rank: RankState, steps: Sequence[Step], is_forward: bool) -> float:
    """The time before which the host can't launch the dispatch that the rank has just issued.

    It launches that before the next collective, or where the dispatch is waited for (``runtime/comm.py``), so behind
    the ops in front of it.
    """
    assert rank.pending is not None
    own_counts, host_ms = counts_key(rank.pending), rank.host_ms
    for verb, place, action in steps[rank.index + 1 :]:
        if verb is Compute:
            host_ms += action.forward_host_ms if is_forward or place & BESIDE else action.backward_host_ms
            continue
        is_own = verb in (Launch, Wait) and counts_key(key_of(place, action)) == own_counts
        if verb is LaunchCounts or (verb is Launch and not is_own) or (verb is Wait and is_own):
            break
    return host_ms
