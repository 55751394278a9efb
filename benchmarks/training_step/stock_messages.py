"""Stock's all-to-alls over a transport of ours: both variants of a comparison have the same connections."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import token_dispatcher

from megatron_lancet.patching import around
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.base import Transport
from megatron_lancet.schedule.ops import Op, OpKind, Phase

DISPATCH, COUNTS = (str(Op.beside_layers(Phase.FORWARD, kind)) for kind in (OpKind.DISPATCH, OpKind.COUNTS))
"""Names of what stock waits for. It does not tell its messages apart."""


def _not_watched(name: str, num_bytes: int) -> AbstractContextManager[None]:
    del name, num_bytes
    return nullcontext()


@dataclass(frozen=True)
class StockMessages:
    """Where stock's rows and counts go.

    Attributes:
        stats: counts messages and what waits for token counts; the transport counts waits for rows.
        connect: the transport of rows, and the group in which token counts are gathered. Called for each message, at
            the same place on all ranks.
        watched: entered for each wait, with its name and the bytes of rows that leave this rank.
    """

    stats: CommStats
    connect: Callable[[], tuple[Transport, dist.ProcessGroup]]
    watched: Callable[[str, int], AbstractContextManager[None]] = _not_watched

    @contextmanager
    def sent(self) -> Iterator[None]:
        """Inside, every all-to-all of stock takes the transport, and is waited for at once."""
        with (
            around(dist, "all_to_all_single", self._all_to_all),
            around(token_dispatcher, "gather_from_sequence_parallel_region", self._gather_counts),
        ):
            yield

    def _all_to_all(
        self,
        stock: Callable[..., Any],
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if group is not parallel_state.get_expert_model_parallel_group():  # the transport's own messages
            return stock(output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op)
        assert not async_op
        assert output_split_sizes is not None
        assert input_split_sizes is not None
        received, sent = ([int(rows) for rows in sizes] for sizes in (output_split_sizes, input_split_sizes))
        num_rows = sum(sent) - sent[dist.get_rank(group)]
        num_bytes = num_rows * input.element_size() * input.shape[1:].numel()
        self.stats.add("num_all_to_alls", 1)
        self.stats.add("payload_bytes", num_bytes)
        transport, _ = self.connect()
        with self.watched(DISPATCH, num_bytes):
            transport.launch(output, input, received, sent).wait()
        return None

    def _gather_counts(self, stock: Callable[..., Any], input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert not input_.requires_grad, "without tensor parallelism only counts are gathered"
        _, kwargs["group"] = self.connect()
        with self.stats.waiting("counts_exposed_ms"), self.watched(COUNTS, 0):
            return stock(input_, *args, **kwargs)
