"""Three ranks exchange rows; the last one meets a fault before the second exchange. The others print their error.

Usage: peers_worker.py kill|stop
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
from megatron_lancet.schedule.ops import Op, Phase
from tests.fakes import cpu_stats

TIMEOUT = timedelta(seconds=3)


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    stats = cpu_stats()
    store = dist.distributed_c10d._get_default_store()
    peers = Peers(range(num_ranks), rank, store, TIMEOUT)
    comm = Comm(PerSenderTransport(dist.group.WORLD, dist.group.WORLD, stats, TIMEOUT), None, stats, rank, peers)
    splits = RowSplits(sent=(2,) * num_ranks, received=(2,) * num_ranks)
    for layer in (1, 2):
        if layer == 2:
            dist.barrier()  # a rank does not wait until the others have its rows, and would take layer 1's with it
        if layer == 2 and rank == num_ranks - 1:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[sys.argv[1]])
        comm.launch(Op(layer, 0, Phase.FORWARD, "combine"), (torch.ones(2 * num_ranks, 3),), splits).wait()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        main()
    except PeerError as error:
        os.write(1, f"{error}\n".encode())
        os._exit(1)
