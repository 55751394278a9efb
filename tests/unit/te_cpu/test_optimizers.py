"""Optimizer and gradient norm functions of the tests' Transformer Engine against torch's."""

from collections.abc import Callable

import pytest
import torch

from tests.te_cpu import extension as tex

LR, BETAS, EPSILON, DECAY = 0.1, (0.8, 0.9), 1e-6, 0.05
NUM_STEPS = 4


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def gradients(step: int) -> list[torch.Tensor]:
    return [randn(4, 3) * step, randn(7) / step]


def by_torch(optimizer: Callable[..., torch.optim.Optimizer], **settings) -> list[torch.Tensor]:
    """Weights after a few steps of torch's optimizer."""
    weights = [randn(4, 3).requires_grad_(), randn(7).requires_grad_()]
    stepper = optimizer(weights, lr=LR, weight_decay=DECAY, **settings)
    for step in range(1, NUM_STEPS + 1):
        for weight, grad in zip(weights, gradients(step), strict=True):
            weight.grad = grad
        stepper.step()
    return [weight.detach() for weight in weights]


def new_state(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Parameters and both moments."""
    weights = [randn(4, 3).to(dtype), randn(7).to(dtype)]
    return [weights, [torch.zeros(4, 3), torch.zeros(7)], [torch.zeros(4, 3), torch.zeros(7)]]


@pytest.mark.parametrize("mode", [0, 1], ids=["adam", "adamw"])
def test_te_adam_equals_torch(mode):
    state = new_state(torch.float32)
    for step in range(1, NUM_STEPS + 1):
        tex.multi_tensor_adam(0, torch.zeros(1), [gradients(step), *state], LR, *BETAS, EPSILON, step, mode, 1, DECAY)
    expected = by_torch([torch.optim.Adam, torch.optim.AdamW][mode], betas=BETAS, eps=EPSILON)
    torch.testing.assert_close(state[0], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("is_capturable", [False, True])
def test_te_adam_with_masters_keeps_them_in_fp32(is_capturable):
    params, *moments = new_state(torch.bfloat16)
    masters = new_state(torch.float32)[0]
    for step in range(1, NUM_STEPS + 1):
        if is_capturable:
            grads = [2 * grad for grad in gradients(step)]  # of a loss that is scaled by 2
            tex.multi_tensor_adam_capturable_master(
                *(0, torch.zeros(1), [grads, params, *moments, masters], torch.tensor(LR), *BETAS, EPSILON),
                *(torch.tensor([step]), 1, 1, DECAY, torch.tensor([0.5])),
            )
            torch.testing.assert_close(grads, gradients(step))
        else:
            lists = [gradients(step), params, *moments, masters]
            tex.multi_tensor_adam(0, torch.zeros(1), lists, LR, *BETAS, EPSILON, step, 1, 1, DECAY)
    expected = by_torch(torch.optim.AdamW, betas=BETAS, eps=EPSILON)
    torch.testing.assert_close(masters, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(params, [weight.bfloat16() for weight in masters], atol=0, rtol=0)


def test_te_adam_that_is_capturable_skips_a_step_with_overflow():
    state = new_state(torch.float32)
    tex.multi_tensor_adam_capturable(
        *(0, torch.ones(1), [gradients(1), *state], torch.tensor(LR), *BETAS, EPSILON, torch.tensor([1]), 1, 1, DECAY),
        torch.ones(1),
    )
    torch.testing.assert_close(state, new_state(torch.float32), atol=0, rtol=0)


def test_te_adam_with_remainders_equals_fp32_masters_bitwise():
    params, *moments = new_state(torch.bfloat16)
    masters = [param.float() for param in params]
    remainders = [torch.zeros(param.shape, dtype=torch.int16) for param in params]
    other = [[moment.clone() for moment in kind] for kind in moments]
    for step in range(1, NUM_STEPS + 1):
        settings = (LR, *BETAS, EPSILON, step, 1, 1, DECAY)
        flag = torch.zeros(1)
        tex.multi_tensor_adam_param_remainder(0, flag, [gradients(step), params, *moments, remainders], *settings)
        tex.multi_tensor_adam(0, flag, [gradients(step), masters, *other], *settings)
    for param, remainder, master in zip(params, remainders, masters, strict=True):
        high = param.view(torch.int16).int() - (remainder < 0).int()
        joined = ((high << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)
        torch.testing.assert_close(joined, master, atol=0, rtol=0)
        assert remainder.any()
        # To the nearest, ties up.
        assert (param.float() - master).abs().max() <= (master.abs() * 2.0**-8).max()


@pytest.mark.parametrize("nesterov", [False, True])
def test_te_sgd_equals_torch(nesterov):
    weights, momenta, _ = new_state(torch.float32)
    for step in range(1, NUM_STEPS + 1):
        tex.multi_tensor_sgd(
            *(0, torch.zeros(1), [gradients(step), weights, momenta], DECAY, 0.7, 0.0, LR, nesterov, step == 1),
            *(False, 1.0),
        )
    expected = by_torch(torch.optim.SGD, momentum=0.7, nesterov=nesterov)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)


def test_te_norm_of_gradients_is_of_all_together():
    grads, flag = gradients(2), torch.zeros(1, dtype=torch.int)
    norm, norms = tex.multi_tensor_l2norm(0, flag, [grads], True)
    torch.testing.assert_close(norm, torch.cat([grad.flatten() for grad in grads]).norm().reshape(1))
    torch.testing.assert_close(norms, torch.stack([grad.norm() for grad in grads]))
    unscaled, _ = tex.multi_tensor_unscale_l2norm(0, flag, [grads], torch.tensor([0.25]), False)
    torch.testing.assert_close(unscaled, norm / 4)
    assert flag.item() == 0
    grads[1][2] = float("inf")
    tex.multi_tensor_l2norm(0, flag, [grads], False)
    assert flag.item() == 1


def test_te_scale_of_gradients_says_where_one_is_not_finite():
    grads, flag = gradients(1), torch.zeros(1, dtype=torch.int)
    scaled = [torch.empty_like(grad) for grad in grads]
    tex.multi_tensor_scale(0, flag, [grads, scaled], 0.5)
    torch.testing.assert_close(scaled, [grad / 2 for grad in grads])
    assert flag.item() == 0
    grads[0][0, 0] = float("nan")
    tex.multi_tensor_scale_tensor(0, flag, [grads, grads], torch.tensor([0.5]))
    assert flag.item() == 1
