"""Functions over lists of tensors, which optimizers and gradient clipping call: ``csrc/extensions/multi_tensor``.

``tensor_lists`` are lists of equal length, one per kind of tensor; ``chunk_size`` says how a GPU divides the work.
"""

from collections.abc import Iterable, Sequence

import torch

from tests.te_cpu.dense import dense

TensorLists = Sequence[Sequence[torch.Tensor]]


def _tuples(tensor_lists: TensorLists) -> Iterable[tuple[torch.Tensor, ...]]:
    return zip(*tensor_lists, strict=True)


@dense("noop_flag", "tensor_lists")
def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """Writes the scaled first list into the second; ``noop_flag`` becomes 1 where a value is not finite."""
    for source, target in _tuples(tensor_lists):
        if not torch.isfinite(source).all():
            noop_flag.fill_(1)
        target.copy_(source.float() * scale)


@dense("is_infinite", "tensor_lists", "scale")
def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: TensorLists, scale: torch.Tensor
) -> None:
    """The same with a scale that lies in a tensor."""
    multi_tensor_scale(chunk_size, is_infinite, tensor_lists, scale.item())


@dense("noop_flag", "tensor_lists")
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, per_tensor_python: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of all tensors of the list together, and of each; ``noop_flag`` becomes 1 where one is not finite."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    if not torch.isfinite(norms).all():
        noop_flag.fill_(1)
    return norms.norm().reshape(1), norms if per_tensor_python else torch.empty(0)


@dense("noop_flag", "tensor_lists", "inv_scale")
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    inv_scale: torch.Tensor,
    per_tensor_python: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of scaled tensors, which stay as they are."""
    norm, norms = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor_python)
    return norm * inv_scale, norms * inv_scale


def _adam(
    weight: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: float,
    betas: tuple[float, float],
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> torch.Tensor:
    """The new weight in fp32; moments change in place. Mode 0 adds weight decay to the gradient, 1 to the step."""
    grad, weight = grad.float(), weight.float()
    if mode == 0:
        grad = grad + weight_decay * weight
    exp_avg.copy_(betas[0] * exp_avg.float() + (1 - betas[0]) * grad)
    exp_avg_sq.copy_(betas[1] * exp_avg_sq.float() + (1 - betas[1]) * grad * grad)
    corrections = [1 - beta**step if bias_correction else 1.0 for beta in betas]
    update = (exp_avg.float() / corrections[0]) / ((exp_avg_sq.float() / corrections[1]).sqrt() + epsilon)
    if mode == 1:
        update = update + weight_decay * weight
    return weight - lr * update


@dense("noop_flag", "tensor_lists")
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """A step of Adam. Lists: gradients, parameters, first moments, second moments; and fp32 masters of parameters."""
    for grad, param, exp_avg, exp_avg_sq, *masters in _tuples(tensor_lists):
        master = masters[0] if masters else param
        settings = (lr, (beta1, beta2), epsilon, step, mode, bias_correction, weight_decay)
        new = _adam(master, grad, exp_avg, exp_avg_sq, *settings)
        master.copy_(new)
        param.copy_(new)


@dense("noop_flag", "tensor_lists", "lr", "step", "inv_scale")
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """A step of Adam, unless ``noop_flag`` is 1, with settings that lie in tensors; gradients are unscaled in place."""
    if noop_flag.item() == 1:
        return
    for grad in tensor_lists[0]:
        grad.copy_(grad.float() * inv_scale)
    settings = (float(lr), beta1, beta2, epsilon, int(step), mode, bias_correction, weight_decay)
    multi_tensor_adam(chunk_size, noop_flag, tensor_lists, *settings)


@dense("noop_flag", "tensor_lists", "lr", "step", "inv_scale")
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """The same with fp32 masters as fifth list."""
    settings = (lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale)
    multi_tensor_adam_capturable(chunk_size, noop_flag, tensor_lists, *settings)


@dense("noop_flag", "tensor_lists")
def multi_tensor_adam_param_remainder(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """A step of Adam whose fp32 masters are a bf16 parameter and, as fifth list, 16 further bits in int16.

    A remainder with its sign bit set stands for a parameter that was rounded up.
    """
    for grad, param, exp_avg, exp_avg_sq, remainder in _tuples(tensor_lists):
        high, low = param.view(torch.int16).int(), remainder.int()
        master = (((high - (low < 0).int()) << 16) | (low & 0xFFFF)).view(torch.float32)
        settings = (lr, (beta1, beta2), epsilon, step, mode, bias_correction, weight_decay)
        bits = _adam(master, grad, exp_avg, exp_avg_sq, *settings).view(torch.int32)
        remainder.copy_((bits << 16) >> 16)
        param.view(torch.int16).copy_((bits >> 16) + (remainder < 0).int())


@dense("noop_flag", "tensor_lists")
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """A step of SGD, unless ``noop_flag`` is 1. Lists: gradients, parameters, momenta; and low-precision copies."""
    if noop_flag.item() == 1:
        return
    for grad, param, average, *copies in _tuples(tensor_lists):
        update = grad.float() * scale
        if not wd_after_momentum:
            update = update + wd * param.float()
        if momentum != 0:
            average.copy_(update if first_run else momentum * average + (1 - dampening) * update)
            update = update + momentum * average if nesterov else average.float()
        if wd_after_momentum:
            update = update + wd * param.float()
        param.copy_(param.float() - lr * update)
        for copy in copies:
            copy.copy_(param)
