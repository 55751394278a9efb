"""The locality loss against its formula, written plainly in double precision; with chunks equal to without."""

import math

import pytest
import torch

from megatron_lancet.features.locality.loss import LOSS_NAME, SMOOTHING, LocalityLoss, RankLocality
from megatron_lancet.model.adopt import adopt
from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.routing.router import ChunkedTopKRouter
from megatron_lancet.schedule.nodes import Nodes
from tests.small_gpt import EXPERTS, transformer_config

NUM_EXPERTS, HIDDEN, POSITIONS, SAMPLES, MU = 8, 32, 6, 4, 0.3
LOCAL = RankLocality(MU, (2, 3), NUM_EXPERTS)


@pytest.fixture
def router(one_rank):
    """Routers with the same weights, for some settings of the config."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler, TopKRouter

    def make(locality=LOCAL, **settings):
        torch.manual_seed(3)
        no_balance = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}
        config = transformer_config(**{**EXPERTS, "num_moe_experts": NUM_EXPERTS, **no_balance, **settings})
        made = adopt(TopKRouter(config, get_default_pg_collection()), ChunkedTopKRouter)
        made.set_layer_number(1)
        made.begin_micro_batch()
        if locality is not None:
            made.add_loss(locality)
        return made

    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    destroy_moe_metrics_tracker()
    yield make
    destroy_moe_metrics_tracker()


def hidden_states():
    return torch.randn(POSITIONS, SAMPLES, HIDDEN, generator=torch.Generator().manual_seed(7))


def by_formula(router, hidden, scores_of=lambda logits: logits.softmax(-1)):
    """The loss and its gradient to the router's weight, from the definition, expert by expert."""
    weight = router.weight.detach().double().requires_grad_()
    scores = scores_of(hidden.double().view(-1, HIDDEN) @ weight.t())
    loss = torch.zeros((), dtype=torch.float64)
    for expert in range(NUM_EXPERTS):
        present = scores[:, expert].sum() / len(scores)
        local = SMOOTHING / NUM_EXPERTS
        if expert in (2, 3):
            local += (1 - SMOOTHING) / 2
        loss = loss + MU * present * torch.log(present / local)
    loss.backward()
    return loss.item(), weight.grad


def logged() -> float:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    return get_moe_metrics_tracker().metrics[LOSS_NAME].values[0].item()


def whole(router, hidden):
    """The gradient of the loss alone: probabilities themselves get none."""
    probs, _ = router(hidden)
    (probs.sum() * 0).backward()
    return router.weight.grad


def in_chunks(router, hidden, num_chunks: int, dim: int):
    parts = hidden.chunk(num_chunks, dim=dim)
    start, outputs = 0, []
    for index, part in enumerate(map(torch.Tensor.contiguous, parts)):
        size = part.size(dim)
        outputs.append(router(part, chunk=Chunk(index, num_chunks, dim, start))[0].sum())
        start += size
    (torch.stack(outputs).sum() * 0).backward()
    return router.weight.grad


@pytest.mark.parametrize("settings", [{}, {"moe_router_score_function": "sigmoid"}], ids=["softmax", "sigmoid"])
def test_gradient_equals_the_formulas(router, settings):
    def sigmoid(logits):
        return logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)

    ours = router(**settings)
    loss, gradient = by_formula(ours, hidden_states(), *([sigmoid] if settings else []))
    found = whole(ours, hidden_states())
    assert logged() * MU == pytest.approx(loss, rel=1e-5)
    assert (found.double() - gradient).norm() <= 1e-6 * gradient.norm()
    assert gradient.norm() > 1e-3


@pytest.mark.parametrize(("num_chunks", "dim"), [(2, 0), (2, 1), (4, 1)])
def test_chunks_have_the_loss_of_the_whole_micro_batch_once(router, num_chunks, dim):
    expected = whole(router(), hidden_states())
    loss = logged()
    found = in_chunks(router(), hidden_states(), num_chunks, dim)
    assert logged() == pytest.approx(2 * loss, rel=1e-6)
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_a_loss_per_chunk_would_be_another_one(router):
    """Negative control of the last test: the divergence is no mean over chunks."""
    expected = whole(router(), hidden_states())
    apart = router()
    for part in hidden_states().chunk(2, dim=0):
        (apart(part)[0].sum() * 0).backward()
    assert (apart.weight.grad / 2 - expected).norm() > 1e-3 * expected.norm()


def test_without_the_loss_nothing_changes_to_the_bit(router):
    """Next to a balancing loss; and with it, that loss's gradient is still there."""
    balance = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    plain = whole(router(locality=None, **balance), hidden_states())
    both = whole(router(**balance), hidden_states())
    alone = whole(router(), hidden_states())
    assert torch.equal(plain, whole(router(locality=None, **balance), hidden_states()))
    assert (both - plain - alone).norm() <= 1e-5 * both.norm()
    assert not torch.equal(both, plain)


def test_evaluation_has_no_loss(router):
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    with torch.no_grad():
        in_chunks_router = router()
        for index, part in enumerate(hidden_states().chunk(2, dim=0)):
            in_chunks_router(part, chunk=Chunk(index, 2, 0, 3 * index))
        router()(hidden_states())
    assert LOSS_NAME not in get_moe_metrics_tracker().metrics


def test_known_values_of_the_divergence():
    local = LOCAL.local_distribution(torch.zeros(1, dtype=torch.float64))
    assert local.sum().item() == pytest.approx(1)
    assert LOCAL(local[None]).item() == pytest.approx(0, abs=1e-12)
    elsewhere = torch.zeros(5, NUM_EXPERTS, dtype=torch.float64)
    elsewhere[:, 7] = 1
    assert LOCAL(elsewhere).item() == pytest.approx(MU * math.log(NUM_EXPERTS / SMOOTHING))


def test_an_expert_without_any_probability_has_a_finite_gradient():
    scores = torch.zeros(5, NUM_EXPERTS)
    scores[:, 2] = 1
    scores.requires_grad_()
    LOCAL(scores).backward()
    assert scores.grad.isfinite().all()


def test_experts_of_a_node_follow_from_its_ranks():
    loss = LocalityLoss(MU, Nodes(2, 2))
    assert [loss.of_rank(rank, 8).local_experts for rank in range(4)] == [(0, 1, 2, 3)] * 2 + [(4, 5, 6, 7)] * 2
    assert LocalityLoss(MU, Nodes(4, 1)).of_rank(1, 8).local_experts == (2, 3)


def test_experts_of_the_node_are_those_at_its_places():
    """Ranks 2 and 3 are the second node; experts 0 and 1 have moved there."""
    loss = LocalityLoss(0.5, Nodes(2, 2)).of_rank(2, 4)
    assert loss.local_experts == (2, 3)
    assert loss.at_slots_of((3, 2, 0, 1)) == LocalityLoss(0.5, Nodes(2, 2)).of_rank(0, 4)
