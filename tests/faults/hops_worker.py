"""Four ranks, as two nodes of two, exchange rows in two hops; the last one meets a fault. The others print their error.

Usage: hops_worker.py kill|stop KIND. The fault comes before the message of that kind in the second layer.
"""

import faulthandler
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
KINDS = (OpKind.NODE_DISPATCH, OpKind.LOCAL_DISPATCH, OpKind.LOCAL_COMBINE, OpKind.NODE_COMBINE)
"""In the order of a layer."""


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    stats = cpu_stats()
    store = dist.distributed_c10d._get_default_store()
    world = dist.group.WORLD
    comm = Comm(
        PerSenderTransport(world, world, stats, TIMEOUT),
        None,
        stats,
        rank,
        Peers(range(num_ranks), rank, store, TIMEOUT),
        hops=make_hops(Nodes(2, 2), 1, world, torch.device("cpu"), stats, TIMEOUT, store),
    )
    splits = RowSplits(sent=(2, 2), received=(2, 2))
    for layer in (1, 2, 3):
        if layer == 2:
            dist.barrier()  # a rank does not wait until the others have its rows, and would take layer 1's with it
        for kind in KINDS:
            if layer == 2 and rank == num_ranks - 1 and kind == sys.argv[2]:
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[sys.argv[1]])
            comm.launch(Op(layer, 0, Phase.FORWARD, kind), (torch.ones(4, 3),), splits).wait()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        main()
    except PeerError as error:
        os.write(1, f"{error}\n".encode())
        os._exit(1)
