"""Private memory of graphs: what a capture frees, the next capture of the pool gets again, at once."""

import weakref
from collections import defaultdict

import numpy as np
import torch

from megatron_lancet.testkit.virtual_gpu.memory import POISON, Allocation, Memory, call_site


class VirtualPool:
    """A memory pool of graphs.

    Memory that is freed in a capture belongs to the pool, and the next allocation of its size takes it. That is the
    order in which replays run, so no kernel has to wait for it; the accesses of both are of one allocation.

    Attributes:
        num_bytes: all memory that the pool has taken.
    """

    def __init__(self, memory: Memory) -> None:
        self.num_bytes = 0
        self._memory = memory
        self._free: dict[int, list[Allocation]] = defaultdict(list)

    def new(self, num_bytes: int) -> torch.UntypedStorage:
        """Allocates memory; its content is not defined."""
        free = self._free[num_bytes]
        allocation = free.pop() if free else self._allocate(num_bytes)
        assert allocation.data is not None
        seen = allocation.data[:]  # the program's storage holds this object, which goes with it
        storage = torch.from_numpy(seen).untyped_storage()
        self._memory.place(storage, allocation)
        weakref.finalize(seen, self._release, storage._cdata, allocation).atexit = False
        return storage

    def _allocate(self, num_bytes: int) -> Allocation:
        self.num_bytes += num_bytes
        return Allocation(None, False, call_site(), np.full(num_bytes, POISON, dtype=np.uint8))

    def _release(self, address: int, allocation: Allocation) -> None:
        assert allocation.data is not None
        self._memory.forget(address, allocation)
        self._free[allocation.data.nbytes].append(allocation)
