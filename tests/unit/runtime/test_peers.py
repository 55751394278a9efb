"""Who is to blame, by a store that some of the other ranks write to."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_lancet.runtime import peers as peers_module
from megatron_lancet.runtime.peers import Peers, _key
from megatron_lancet.schedule.ops import Op, Phase

OP = Op(3, 1, Phase.INPUT_GRAD, "combine")
CAUSE = RuntimeError("Read error: Connection reset by peer. A lot of advice follows.")


def failure(ranks, waited_s, store=None, micro_batch=None, connected_by_others=(), cause=CAUSE) -> str:
    peers = Peers(ranks, ranks[0], store or dist.HashStore(), timedelta(seconds=30), connected_by_others)
    return str(peers.failure(OP, waited_s, cause, micro_batch))


def test_only_peer_is_named_as_missing():
    assert failure([4, 6], waited_s=1) == (
        "rank 4 gave up on L3.c1.I.combine (layer 3, chunk 1, backward (input gradient), combine): rank 6 closed the "
        "connection. The output of that rank, or its system log, gives the reason. Reported by the transport: "
        "Read error: Connection reset by peer"
    )


def test_micro_batch_is_named_where_it_is_known():
    assert " gave up on L3.c1.I.combine (layer 3, chunk 1, backward (input gradient), combine) of micro-batch 3: " in (
        failure([4, 6], waited_s=1, micro_batch=3)
    )


def test_peers_are_missing_after_the_timeout():
    assert ": rank 6 sent nothing for 30 s. " in failure([4, 6], waited_s=30.2)


def test_message_behind_one_that_timed_out_is_silence_too():
    """It was launched late, so it has waited for less than the timeout when both fail."""
    cause = RuntimeError("[unbound_buffer.cc:129] Timed out waiting 30000ms for send operation to complete")
    assert ": rank 6 sent nothing for 30 s. " in failure([4, 6], waited_s=29.9, cause=cause)


@pytest.mark.parametrize(
    ("ranks", "connected_by_others", "gave_up", "blamed"),
    [
        ([0, 1, 2, 3], (), [0, 1, 3], "rank 2 closed"),
        ([0, 1, 2, 3], (), [0, 3], "one or more of ranks 1-2 closed"),
        ([0, 1, 2, 3], (), [0, 1, 2, 3], "ranks 1-3 failed"),
        # Rank 0 is connected to rank 2 on the other node, and that one to rank 3 on its own.
        ([0, 2], range(4), [], "rank 2 closed"),
        ([0, 2], range(4), [1], "rank 2 closed"),
        ([0, 2], range(4), [1, 2], "rank 3 closed"),
        ([0, 2], range(4), [1, 2, 3], "rank 2 failed as well"),
    ],
)
def test_rank_that_did_not_give_up_is_named(monkeypatch, ranks, connected_by_others, gave_up, blamed):
    monkeypatch.setattr(peers_module, "_REGISTRATION_S", 0.2)
    store = dist.HashStore()
    for rank in gave_up:
        store.set(_key(rank), "")
    assert f": {blamed}" in failure(ranks, waited_s=1, store=store, connected_by_others=connected_by_others)


class LostStore:
    def set(self, key, value):
        raise dist.DistNetworkError("Broken pipe")


def test_all_peers_are_named_without_the_store():
    assert ": one or more of ranks 1-2 closed " in failure([0, 1, 2], waited_s=1, store=LostStore())
