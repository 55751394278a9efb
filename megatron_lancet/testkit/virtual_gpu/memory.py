"""Memory of a virtual GPU: who reads and writes which bytes, and whether memory is freed too early.

Every new tensor lives in memory of its own, of which the program holds a storage and this module an alias. When the
last reference to the storage is gone, the caching allocator could give the memory to the next kernel of the stream on
which it was allocated. So it is an error if a kernel of another stream uses it, the tensor was not recorded on that
stream, and the allocating stream has not waited for it. New memory may be some that kernels in front of the allocation
still use, so the allocation counts as a write on its stream. No address has to be used again for either.
"""

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lancet.testkit.virtual_gpu.order import Order

POISON = 0xFF
"""Byte of memory whose content is not defined: NaN in floating-point types, -1 in integers."""

_empty = torch.empty
"""Torch's own function: inside of a virtual GPU the name leads to one that notes new memory."""
_SITE_DEPTH = 5
_SITE_PARTS = ("/megatron/", "/megatron_lancet/", "/tests/")
_NOT_SITES = (
    *("/megatron_lancet/testkit/virtual_gpu/", "/megatron_lancet/testkit/mock/", "/megatron_lancet/patching.py"),
    f"{Path(torch.__file__).parent}/",  # in full: the program may lie in a folder of that name
)


class Access(NamedTuple):
    """A kernel's access to bytes ``start`` to ``end`` of an allocation."""

    start: int
    end: int
    stream: int
    kernel: int
    name: str
    site: str


@dataclass(eq=False)
class Allocation:
    """Memory of one storage.

    Attributes:
        stream: stream on which it was allocated; None for memory that was there before, whose end is not checked.
        is_host: the memory is the host's.
        data: bytes, if this module owns them.
        weak: the storage, if it does not.
        recorded: streams for which ``record_stream`` was called.
    """

    stream: int | None
    is_host: bool
    site: str = ""
    data: np.ndarray | None = None
    weak: StorageWeakRef | None = None
    alias: torch.UntypedStorage | None = None
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Problem:
    """An order that is missing.

    Attributes:
        kind: ``race`` or ``freed in use``.
        text: what is not ordered behind what.
    """

    kind: str
    text: str


class Memory:
    """All memory that a program has used since it is watched.

    Attributes:
        problems: what was found, each once.
    """

    def __init__(self, order: Order, stream_name: Callable[[int], str], poison: Callable[[Allocation], None]) -> None:
        """
        Args:
            poison: makes the content of freed memory undefined, in the order of its streams.
        """
        self.problems: list[Problem] = []
        self._order = order
        self._name = stream_name
        self._poison = poison
        self._allocations: dict[int, Allocation] = {}
        self._freed: deque[Allocation] = deque()

    def allocation_of(self, tensor: torch.Tensor) -> Allocation:
        """The allocation that a tensor lies in; memory that was there before counts as the device's."""
        storage = tensor.untyped_storage()
        found = self._allocations.get(storage._cdata)
        if found is not None and found.weak is not None and found.weak.expired():
            found = None  # another storage at the same address
        if found is None:
            found = self._allocations[storage._cdata] = Allocation(None, False, weak=StorageWeakRef(storage))
        return found

    def mark_host(self, tensor: torch.Tensor) -> None:
        """Notes that a tensor is in the host's memory."""
        self.allocation_of(tensor).is_host = True

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the host's memory."""
        return self.allocation_of(tensor).is_host

    def new(self, num_bytes: int, stream: int, is_host: bool) -> torch.UntypedStorage:
        """Allocates memory, filled with poison."""
        data = np.full(num_bytes, POISON, dtype=np.uint8)
        seen = data[:]  # the program's storage holds this object, which goes with it
        storage = torch.from_numpy(seen).untyped_storage()
        allocation = self._allocations[storage._cdata] = Allocation(stream, is_host, call_site(), data)
        if not is_host:
            # The allocating stream may have got memory back that its kernels in front of this point still use.
            point = Access(0, num_bytes, stream, self._order.add_kernel(stream), "allocation", allocation.site)
            allocation.writes.append(point)
        weakref.finalize(seen, self._release, storage._cdata, allocation).atexit = False
        return storage

    def place(self, storage: torch.UntypedStorage, allocation: Allocation) -> None:
        """Notes that a storage lies in an allocation."""
        self._allocations[storage._cdata] = allocation

    def forget(self, address: int, allocation: Allocation) -> None:
        """Notes that a storage at an address is gone."""
        if self._allocations.get(address) is allocation:
            del self._allocations[address]

    def _release(self, address: int, allocation: Allocation) -> None:
        """Called when the program's last reference is gone, perhaps in the middle of another method."""
        self.forget(address, allocation)
        self._freed.append(allocation)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements, without a reference to the program's storage."""
        found = self.allocation_of(tensor)
        if found.data is None:
            return placed(tensor.untyped_storage(), tensor)
        if found.alias is None:
            found.alias = torch.from_numpy(found.data).untyped_storage()
        return placed(found.alias, tensor)

    def take_freed(self) -> None:
        """Checks the memory that the program has given back since the last call."""
        while self._freed:
            allocation = self._freed.popleft()
            if not allocation.is_host:
                self._check_free(allocation)
                self._poison(allocation)

    def access(self, tensor: torch.Tensor, stream: int, kernel: int, is_write: bool, name: str, site: str) -> None:
        """Notes that a kernel reads or writes a tensor, and checks that it comes after earlier accesses."""
        covered = span(tensor)
        if covered is not None:
            self.access_bytes(self.allocation_of(tensor), is_write, *covered, stream, kernel, name, site)

    def access_bytes(
        self,
        allocation: Allocation,
        is_write: bool,
        start: int,
        end: int,
        stream: int,
        kernel: int,
        name: str,
        site: str,
    ) -> None:
        """As :meth:`access`, for bytes of an allocation."""
        for other in (*allocation.writes, *(allocation.reads if is_write else ())):
            overlaps = other.start < end and start < other.end
            if overlaps and not self._order.is_before(other.stream, other.kernel, stream):
                self._race(is_write, name, stream, site, other)
        access = Access(start, end, stream, kernel, name, site)
        if is_write:
            allocation.writes = [*(a for a in allocation.writes if not _covers(access, a)), access]
            allocation.reads = [a for a in allocation.reads if not _covers(access, a)]
        else:
            kept = (a for a in allocation.reads if not (a.stream == stream and _covers(access, a)))
            allocation.reads = [*kept, access]

    def _race(self, is_write: bool, name: str, stream: int, site: str, other: Access) -> None:
        self._add_problem(
            "race",
            f"{'write' if is_write else 'read'} by {name} on {self._name(stream)} ({site}) is not ordered after "
            f"{other.name} on {self._name(other.stream)} ({other.site})",
        )

    def _check_free(self, allocation: Allocation) -> None:
        own = allocation.stream
        assert own is not None
        for access in (*allocation.reads, *allocation.writes):
            # The memory is given back when the streams that it was recorded on have passed this point.
            streams = (own, *allocation.recorded)
            if not any(self._order.is_before(access.stream, access.kernel, stream) for stream in streams):
                self._add_problem(
                    "freed in use",
                    f"memory of {self._name(own)} ({allocation.site}) is freed while {access.name} on "
                    f"{self._name(access.stream)} ({access.site}) may still use it",
                )

    def _add_problem(self, kind: str, text: str) -> None:
        problem = Problem(kind, text)
        if problem not in self.problems:
            self.problems.append(problem)


def placed(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A tensor on ``storage`` at the place and with the type of ``like``."""
    return _empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.size(), like.stride())


def call_site() -> str:
    """Where in the program the caller is, innermost function first."""
    frame: FrameType | None = sys._getframe(1)
    sites: list[str] = []
    while frame is not None and len(sites) < _SITE_DEPTH:
        code = frame.f_code
        name = _name_of_site(code.co_filename)
        if name is not None:
            sites.append(f"{name}:{frame.f_lineno}:{code.co_name}")
        frame = frame.f_back
    return " < ".join(sites)


@functools.cache
def _name_of_site(file: str) -> str | None:
    """The name of a file of the program; None for other files."""
    is_site = any(part in file for part in _SITE_PARTS) and not any(part in file for part in _NOT_SITES)
    return file.rsplit("/", 1)[-1] if is_site else None


def _covers(access: Access, other: Access) -> bool:
    return access.start <= other.start and other.end <= access.end


def span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First byte and end of the memory that a tensor's elements lie in; None without elements."""
    if tensor.numel() == 0:
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + int(extent) * tensor.element_size()
