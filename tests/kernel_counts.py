"""Counts operators that a GPU would run as kernels. An operator may be several there, and a compiled function one."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lancet.testkit.virtual_gpu.operators import Kind, base_name, kind_of


class _Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if kind_of(func, args, kwargs or {}) is Kind.KERNEL:
            self.names[base_name(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def kernels() -> Iterator[Counter[str]]:
    """Yields the number of kernels by operator, which grows inside the context."""
    with _Kernels() as counting:
        yield counting.names
