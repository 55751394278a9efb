"""Ranks exchange rows, in two hops if the command line names one; the last rank meets a fault. The others print errors.

Usage: peers_worker.py kill|stop [KIND]. The fault comes in the second layer: before its only exchange, or before the
message of that kind. With two hops there are four ranks, as two nodes of two.
"""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lancet.errors import PeerError
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.exchange import RowSplits
from megatron_lancet.runtime.peers import Peers
from megatron_lancet.runtime.transport.gloo import PerSenderTransport
from megatron_lancet.runtime.transport.select import make_hops
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from tests.fakes import cpu_stats

TIMEOUT = timedelta(seconds=3)
HOPS = (OpKind.NODE_DISPATCH, OpKind.LOCAL_DISPATCH, OpKind.LOCAL_COMBINE, OpKind.NODE_COMBINE)
"""In the order of a layer."""


def main(fault: str, hop: str | None = None) -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    stats, world = cpu_stats(), dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    hops = None
    if hop is not None:
        hops = make_hops(Nodes(2, 2), 1, world, torch.device("cpu"), stats, TIMEOUT, store)
    peers = Peers(range(num_ranks), rank, store, TIMEOUT)
    comm = Comm(PerSenderTransport(world, world, stats, TIMEOUT), None, stats, rank, peers, hops=hops)
    num_others = num_ranks if hops is None else 2  # of a message
    splits = RowSplits(sent=(2,) * num_others, received=(2,) * num_others)
    for layer in (1, 2, 3):
        if layer == 2:
            dist.barrier()  # a rank does not wait until the others have its rows, and would take layer 1's with it
        for kind in HOPS if hops is not None else (OpKind.COMBINE,):
            if layer == 2 and rank == num_ranks - 1 and hop in (None, kind):
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])
            comm.launch(Op(layer, 0, Phase.FORWARD, kind), (torch.ones(2 * num_others, 3),), splits).wait()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except PeerError as error:
        os.write(1, f"{error}\n".encode())
        os._exit(1)
