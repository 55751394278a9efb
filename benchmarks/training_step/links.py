"""The two links as the model sees them, and how stock modules are sent over the same transport as ours."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher

from benchmarks.training_step.megatron_overlap import ThreadedStats
from megatron_lancet.patching import around
from megatron_lancet.runtime.transport.select import make_transport

CPU = torch.device("cpu")


@contextmanager
def groups_on(interface: str) -> Iterator[None]:
    """Groups of gloo's that are made inside the context talk over ``interface``; it is read when a group is made."""
    previous = os.environ["GLOO_SOCKET_IFNAME"]
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = previous


class Link:
    """A transport and a group for stock's counts, both on one interface.

    Attributes:
        stats: what was sent over it, and how long compute waited for it.
    """

    def __init__(self, interface: str, ep_group: dist.ProcessGroup, timeout: timedelta) -> None:
        """Collective over all ranks of the world.

        Args:
            ep_group: expert-parallel group, of all ranks.
        """
        self.interface = interface
        self.stats = ThreadedStats(CPU)
        self._ep_group = ep_group
        with groups_on(interface):
            self.transport = make_transport(ep_group, ep_group, CPU, self.stats, timeout)
            self._counts_group = dist.new_group(backend="gloo", timeout=timeout)

    @contextmanager
    def carries_stock(self) -> Iterator[None]:
        """Inside, stock's all-to-alls and its count exchange use this link, and are counted and timed.

        Every all-to-all takes the transport that ours take, and is waited for at once.
        """
        with (
            around(dist, "all_to_all_single", self._on_transport),
            around(token_dispatcher, "gather_from_sequence_parallel_region", self._counts_here),
        ):
            yield

    def _on_transport(
        self,
        stock: Callable[..., Any],
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if group is not self._ep_group:  # the transport's own messages
            return stock(output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op)
        assert not async_op
        assert output_split_sizes is not None
        assert input_split_sizes is not None
        received, sent = ([int(rows) for rows in sizes] for sizes in (output_split_sizes, input_split_sizes))
        row_bytes = input.element_size() * input.shape[1:].numel()
        self.stats.add("num_all_to_alls", 1)
        self.stats.add("payload_bytes", row_bytes * (sum(sent) - sent[group.rank()]))
        self.transport.launch(output, input, received, sent).wait()
        return None

    def _counts_here(self, stock: Callable[..., Any], input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert not input_.requires_grad, "without tensor parallelism only counts are gathered"
        kwargs["group"] = self._counts_group
        with self.stats.waiting("counts_exposed_ms"):
            return stock(input_, *args, **kwargs)


def sent_bytes(interface: str) -> int:
    """Bytes that left ``interface`` of this process's network namespace since it was made."""
    with open("/proc/self/net/dev") as table:  # noqa: PTH123
        for line in table:
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                return int(counters.split()[8])
    raise RuntimeError(f"this network namespace has no interface {interface}")
