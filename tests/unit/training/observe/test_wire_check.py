"""What a step that runs twice must put back, and when it runs once."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_lancet.training.observe import wire_check
from megatron_lancet.training.observe.wire_check import RecordedData, StepState, why_not_checked


@pytest.mark.parametrize("num_stages", [None, 2])
def test_micro_batches_come_again_and_are_taken_once(num_stages):
    batches = [{"tokens": number} for number in range(4)]
    source = iter(batches)
    recorded = RecordedData(source if num_stages is None else [source] * num_stages)
    first = recorded.whole if num_stages is None else recorded.whole[0]
    taken = [next(first), next(first)]
    taken[0].pop("tokens")  # as a step may do
    recorded.rewind()
    last = recorded.whole if num_stages is None else recorded.whole[-1]
    assert [next(last), next(last)] == batches[:2]
    assert next(last) == batches[2]  # a step that asks for more gets what follows
    assert next(source) == batches[3]


def test_ranks_without_data_have_none():
    assert RecordedData(None).whole is None
    recorded = RecordedData([None, iter([1])])
    assert recorded.whole[0] is None
    assert next(recorded.whole[1]) == 1


class Counting(torch.nn.Module):
    """Counts tokens in a buffer, replaces another one, and draws random numbers."""

    seen: torch.Tensor
    bias: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.register_buffer("bias", torch.ones(2))
        self.register_buffer("unused", None)

    def forward(self):
        self.seen += 1
        self.bias = self.bias * 2
        get_moe_metrics_tracker().record("z_loss", torch.tensor(1.5), layer_number=1, num_layers=2)
        MTPLossLoggingHelper.tracker.setdefault("loss_values", torch.zeros(1)).add_(1.0)
        return random.random(), np.random.rand(), torch.rand(2).tolist()


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_pass_that_was_undone_leaves_nothing(monkeypatch, num_before):
    """Also where it was the first to log a loss, and where the step has logged some before."""
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    counting = Counting()
    for _ in range(num_before):
        counting()
    bias = counting.bias
    state = StepState([counting])
    drawn = counting(), counting()
    state.restore()
    assert counting.seen.tolist() == [num_before] * 2
    assert counting.bias is bias
    assert bias.tolist() == [2.0**num_before] * 2
    metrics = get_moe_metrics_tracker().metrics
    assert {name: entry.values.tolist() for name, entry in metrics.items()} == (
        {"z_loss": [1.5, 0.0]} if num_before else {}
    )
    assert {name: values.tolist() for name, values in MTPLossLoggingHelper.tracker.items()} == (
        {"loss_values": [1.0]} if num_before else {}
    )
    assert (counting(), counting()) == drawn


def test_random_states_that_are_generators_are_put_back(monkeypatch):
    """As with --te-rng-tracker; the objects stay, because modules and CUDA graphs refer to them."""
    generator = torch.Generator().manual_seed(3)
    states = {"model-parallel-rng": generator}
    tracker = SimpleNamespace(get_states=lambda: dict(states), set_states=states.update)
    monkeypatch.setattr(wire_check.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    state = StepState([])
    drawn = torch.rand(4, generator=generator)
    state.restore()
    assert states == {"model-parallel-rng": generator}
    assert torch.rand(4, generator=generator).equal(drawn)


def stage(**config):
    settings = {"overlap_param_gather": False, "use_distributed_optimizer": False, **config}
    return SimpleNamespace(ddp_config=SimpleNamespace(**settings))


@pytest.mark.parametrize(
    ("arguments", "config", "reason"),
    [
        ({}, {}, None),
        ({"fp8": None, "qk_clip": False}, {}, None),
        ({}, {"overlap_param_gather": True, "use_distributed_optimizer": True}, None),
        ({"fp8": "hybrid"}, {}, "with --fp8 the scales of low-precision layers would see the step twice"),
        ({"qk_clip": True}, {}, "with --qk-clip the largest attention logits would be those of both passes"),
        ({}, {"overlap_param_gather": True}, "with --overlap-param-gather and no --use-distributed-optimizer"),
    ],
)
def test_a_step_that_would_leave_traces_is_not_checked(arguments, config, reason):
    found = why_not_checked(SimpleNamespace(**arguments), [stage(), stage(**config)])
    assert found is None if reason is None else found.startswith(reason)
