"""The balancing loss with a document as a sequence, next to stock on documents as samples."""

import itertools
from contextlib import contextmanager

import pytest
import torch
from megatron.core import parallel_state

from megatron_lancet.features.documents import balance
from megatron_lancet.features.documents.lengths import Documents
from megatron_lancet.model.chunking import Chunk
from megatron_lancet.patching import replaced
from megatron_lancet.schedule.chunk_sizes import chunk_sizes
from tests.small_gpt import EXPERTS, transformer_config

HIDDEN, COEFF, SAMPLES = 32, 0.25, ((5, 1, 3, 7), (2, 14))
SETTINGS = {**EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": COEFF}


def router(adopted: bool, **settings):
    """A router with the same weights each time."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_lancet.model.adopt import adopt
    from megatron_lancet.model.routing.router import ChunkedTopKRouter

    torch.manual_seed(3)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    found = TopKRouter(transformer_config(**{**SETTINGS, **settings, "moe_z_loss_coeff": None}), groups)
    found.set_layer_number(1)
    found.weight.data.normal_()
    return adopt(found, ChunkedTopKRouter) if adopted else found


def hidden_states():
    return torch.randn(16, len(SAMPLES), HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.fixture
def auxiliary_loss(one_rank):
    """Gradients of the balancing loss alone: the outputs count nothing."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    destroy_moe_metrics_tracker()

    def gradients(module, hidden, probs, scale=1.0):
        return torch.autograd.grad((0.0 * probs).sum(), (module.weight, hidden), torch.tensor(scale))

    yield gradients
    destroy_moe_metrics_tracker()


def of_stock(gradients, has_fill):
    """Mean over documents of the gradients that stock has for a document as the only sample, and of its losses.

    Args:
        has_fill: whether the last document does not count.
    """
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    whole, found = hidden_states(), []
    documents = [part for sample, own in enumerate(SAMPLES) for part in whole[:, sample].split(list(own))]
    for document in documents[:-1] if has_fill else documents:
        module = router(False)
        found.append(gradients(module, whole, module(document.unsqueeze(1))[0]))
    losses = get_moe_metrics_tracker().metrics["seq_load_balancing_loss"].values.sum() / len(found)
    return [sum(parts) / len(found) for parts in zip(*found, strict=True)], losses.item()


@pytest.mark.parametrize(("num_chunks", "has_fill"), [(1, False), (2, False), (2, True)])
def test_loss_is_the_mean_over_documents_of_stocks_loss(auxiliary_loss, num_chunks, has_fill):
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker

    expected, logged = of_stock(auxiliary_loss, has_fill)
    destroy_moe_metrics_tracker()
    module, hidden = router(True), hidden_states()
    module.begin_micro_batch(Documents(SAMPLES, are_sequences=True, has_fill=has_fill))
    chunks = hidden.split(chunk_sizes(16, num_chunks))
    probs = [module(part, chunk=Chunk(index, num_chunks, dim=0))[0] for index, part in enumerate(chunks)]
    found = auxiliary_loss(module, hidden, torch.cat(probs))
    for ours, stocks in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, stocks, rtol=1e-5, atol=1e-7)
        assert ours.abs().max() > 1e-3
    values = get_moe_metrics_tracker().metrics["seq_load_balancing_loss"].values
    assert values.sum().item() == pytest.approx(logged, rel=1e-6)


def test_loss_per_sample_is_stocks_to_the_bit(auxiliary_loss):
    found = []
    for adopted in (False, True):
        module, hidden = router(adopted), hidden_states()
        if adopted:
            module.begin_micro_batch(Documents(SAMPLES, are_sequences=False))
        found.append(auxiliary_loss(module, hidden, module(hidden)[0]))
    assert all(ours.equal(stocks) for ours, stocks in zip(*found, strict=True))


@contextmanager
def on_rank(context_rank, tensor_rank):
    with (
        replaced(parallel_state, "get_context_parallel_rank", lambda: context_rank),
        replaced(parallel_state, "get_tensor_model_parallel_rank", lambda: tensor_rank),
    ):
        yield


@pytest.mark.parametrize(("tensor_size", "context_size"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_losses_of_ranks_add_up_to_that_of_the_whole(one_rank, tensor_size, context_size):
    documents, num_experts, topk = Documents(SAMPLES, are_sequences=True), 4, 2
    scores = torch.rand(16, len(SAMPLES), num_experts, generator=torch.Generator().manual_seed(2))
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(topk).indices, True)
    config, num_chosen = transformer_config(**SETTINGS), list[torch.Tensor]()
    tokens = scores.view(-1, num_experts), chosen.view(-1, num_experts)
    whole = balance.balancing_loss(tokens[0], tokens[1], documents, config, torch.distributed.group.WORLD, COEFF)
    config.tensor_model_parallel_size, config.context_parallel_size = tensor_size, context_size
    config.sequence_parallel = tensor_size > 1

    def own_loss(sum_over_ranks):
        ranges = balance.ranges_on_rank(16, config)
        own = [torch.cat([tensor[first:stop] for first, stop in ranges]) for tensor in (scores, chosen)]
        own = [tensor.reshape(-1, num_experts) for tensor in own]
        assert len(own[0]) == len(tokens[0]) / (tensor_size * context_size)
        with replaced(balance, "reduce_from_tensor_model_parallel_region", sum_over_ranks):
            return balance.balancing_loss(own[0], own[1], documents, config, None, COEFF)

    def note(counts, group):
        num_chosen.append(counts)
        return counts

    ranks = list(itertools.product(range(context_size), range(tensor_size)))
    for rank in ranks:
        with on_rank(*rank):
            own_loss(note)
    losses = []
    for rank in ranks:
        with on_rank(*rank):
            losses.append(own_loss(lambda counts, group: sum(num_chosen)))
    torch.testing.assert_close(sum(losses), whole)
