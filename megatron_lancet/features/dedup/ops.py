"""The dispatch of distinct rows in a model. Its ops are the plain ones: only the dispatcher differs."""

from collections.abc import Mapping

from megatron_lancet.features.dedup.dispatcher import DeduplicatedDispatcher
from megatron_lancet.model.dispatcher.base import Dispatcher, ExpertRanks
from megatron_lancet.model.parts import ModelPart
from megatron_lancet.schedule.plan import Dispatch


class _Dedup(ModelPart):
    def dispatchers(self, ranks: ExpertRanks) -> Mapping[Dispatch, Dispatcher]:
        """The dispatcher of distinct rows."""
        comm, num_experts, num_ranks, expert_tp_group, _ = ranks
        return {Dispatch.DEDUP: DeduplicatedDispatcher(comm, num_experts, num_ranks, expert_tp_group)}


DEDUP = _Dedup()
