"""Peak of the memory that tensors take, followed storage by storage."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory:
    """Bytes of all storages that came to life on the watched threads and still live; the highest sum seen.

    Storages of ``known`` tensors don't count. At most one of the watched threads may run at a time.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self.peak_bytes = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    @contextmanager
    def watches_this_thread(self) -> Iterator[None]:
        """Inside, what operators of this thread return is followed. torch keeps such a mode for each thread."""
        with _Watch(self):
            yield

    def follow(self, result: Any) -> None:
        """Counts the storages of an operator's result, and forgets those that live no longer."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._live.values()))


class _Watch(TorchDispatchMode):
    def __init__(self, memory: LiveMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._memory.follow(result)
        return result
