"""Transport over the group's own asynchronous all-to-all, for backends such as the mocked group."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.base import CountsTransfer, ReadyEvent, Transfer, Transport
from megatron_lancet.runtime.transport.works import WorkCounts, WorksTransfer


class GroupTransport(Transport):
    """Launches one asynchronous all-to-all of the group per message; the backend overlaps by itself."""

    def __init__(self, ep_group: dist.ProcessGroup, stats: CommStats) -> None:
        self._group = ep_group
        self._stats = stats

    def launch(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        ready: ReadyEvent | None = None,
    ) -> Transfer:
        splits = list(receive_rows), list(send_rows)
        work = dist.all_to_all_single(received, sent, *splits, group=self._group, async_op=True)
        return WorksTransfer([work], (received, sent), self._stats)

    def exchange_counts(self, count: Callable[[], torch.Tensor], ready: ReadyEvent) -> CountsTransfer:
        return WorkCounts(count(), self._group)
