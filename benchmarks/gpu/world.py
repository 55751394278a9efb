"""The mocked expert-parallel group in which one process plays rank 0, and the link of its messages."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from megatron_lancet.patching import around
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_group import MockProcessGroup
from megatron_lancet.testkit.mock.mock_world import mock_world
from megatron_lancet.testkit.mock.paced_link import PacedLink

UsingLink = Callable[[Link], AbstractContextManager[None]]


@contextmanager
def mocked_group(num_ranks: int) -> Iterator[UsingLink]:
    """Inside the context Megatron's expert-parallel group has ``num_ranks`` ranks, of which this process is the first.

    Messages take no time, except inside the context that the yielded function makes for a link.
    """
    from megatron.core import parallel_state

    from megatron_lancet.training.megatron.mock_patches import loopback_counts

    links: dict[Link, PacedLink] = {}

    @contextmanager
    def using_link(link: Link) -> Iterator[None]:
        paced = links.setdefault(link, PacedLink(link))

        def issue(stock: Any, group: MockProcessGroup, *args: Any) -> Any:
            if group.size() > 1:
                group._link = paced
            return stock(group, *args)

        with around(MockProcessGroup, "_issue", issue):
            yield

    with mock_world(num_ranks), loopback_counts():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks, create_gloo_process_groups=False)
        try:
            yield using_link
        finally:
            parallel_state.destroy_model_parallel()
