"""The mocked world of a process: torch.distributed initialised with N ranks of which only one exists."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_lancet.patching import around
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_group import BACKEND, MockProcessGroup
from megatron_lancet.testkit.mock.mock_work import Clock
from megatron_lancet.testkit.mock.paced_link import NUM_SMS, PacedLink

_FREE = Link()
_DEFAULT_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class MockedNodes:
    """Nodes of a mocked world, whose ranks lie node by node.

    Attributes:
        ranks_per_node: of each node.
        link: link model of groups that lie inside a node.
    """

    ranks_per_node: int
    link: Link

    def holds(self, ranks: Sequence[int]) -> bool:
        """Whether all of these ranks are on one node."""
        return len({rank // self.ranks_per_node for rank in ranks}) == 1


@contextmanager
def mock_world(
    num_ranks: int,
    link: Link = _FREE,
    timeout: timedelta = _DEFAULT_TIMEOUT,
    nodes: MockedNodes | None = None,
    num_sms: int = NUM_SMS,
) -> Iterator[None]:
    """Inside the context ``torch.distributed`` is initialised as rank 0 of ``num_ranks``.

    All process groups created inside are mocked, also those that ask for gloo. All are destroyed at the end. Groups
    whose link models are equal share one link on a device; groups inside a node have another one.

    Args:
        link: link model of each group that is created without its own (``new_group(pg_options=Link(...))``).
        nodes: what groups inside a node have in its place; None if all groups have ``link``.
        num_sms: SMs that a message on a GPU takes, at most.

    Raises:
        RuntimeError: at the end, if a message on a GPU has given up.
    """
    clock = Clock()
    links: dict[Link, PacedLink] = {}
    link_in_node = None if nodes is None else PacedLink(nodes.link, num_sms)

    def create(options: Any, pg_options: Any) -> MockProcessGroup:
        if isinstance(pg_options, PacedLink):
            own_link = pg_options
        else:
            model = pg_options if isinstance(pg_options, Link) else link
            own_link = links.setdefault(model, PacedLink(model, num_sms))
        group_rank, group_size = options.group_rank, options.group_size
        return MockProcessGroup(options.group_id, group_rank, group_size, own_link, options.timeout, clock)

    def mocked_group(
        stock: Any, ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **kwargs: Any
    ) -> Any:
        """Creates a mocked group, whatever backend is asked for."""
        if nodes is not None and not isinstance(pg_options, Link) and nodes.holds(ranks or range(num_ranks)):
            pg_options = link_in_node
        return stock(ranks, timeout, BACKEND, pg_options, **kwargs)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    try:
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=num_ranks, timeout=timeout)
        with around(dist, "new_group", mocked_group), around(distributed_c10d, "new_group", mocked_group):
            yield
        for one in (*links.values(), *([link_in_node] if link_in_node is not None else [])):
            one.check()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        clock.close()
