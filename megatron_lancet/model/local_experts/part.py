"""The local experts of a model without Transformer Engine, which may run layer by layer; see ``module.py``."""

import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron_lancet.model.adopt import adopt
from megatron_lancet.model.local_experts.module import GroupingSequentialMLP
from megatron_lancet.model.parts import ModelPart


class _LocalExperts(ModelPart):
    def adopt_experts(self, experts: torch.nn.Module) -> None:
        """Lets Megatron's sequential experts run layer by layer."""
        if type(experts) is SequentialMLP:
            adopt(experts, GroupingSequentialMLP)


LOCAL_EXPERTS = _LocalExperts()
