"""Layers of classes that the overlapping model does not know are refused, also those derived from known ones."""

import pytest
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_lancet.errors import UsageError
from megatron_lancet.model.gpt import overlap
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.transport.local import LocalTransport
from megatron_lancet.schedule.plan import DwPolicy, fixed_plan
from tests.fakes import cpu_stats
from tests.small_gpt import EXPERTS, small_gpt, transformer_config


class StreamsLayer(TransformerLayer):
    """A layer that works on several residual streams, as layers with hyper-connections do."""

    num_streams = 4


@pytest.mark.usefixtures("one_rank")
def test_layer_derived_from_a_known_one_is_refused():
    model = small_gpt(transformer_config(**{**EXPERTS, "num_layers": 2}))
    model.decoder.layers[1].__class__ = StreamsLayer
    with pytest.raises(UsageError, match=r"runs TransformerLayer, but the model spec built StreamsLayer\. .*off\.$"):
        overlap(model, fixed_plan(2, DwPolicy.NONE), Comm(LocalTransport(), None, cpu_stats(), own_rank=0))
