"""The fused router: ``csrc/extensions/router.cpp``. It saves the logits in fp32 for backward."""

from collections.abc import Callable

import torch

from tests.te_cpu.dense import dense


def _scores(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    if score_function == "softmax":
        return torch.softmax(logits, dim=-1)
    if score_function != "sigmoid":
        raise NotImplementedError(f"the fused router with {score_function} has no stand-in on a CPU")
    return torch.sigmoid(logits)


def _chosen(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Returns True for each token's experts, [tokens, experts]."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(topk, dim=-1).indices, value=True)


def _probs(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
) -> torch.Tensor:
    if score_function == "softmax" and not use_pre_softmax:
        probs = torch.softmax(logits.masked_fill(~chosen, float("-inf")), dim=-1)
    else:
        probs = _scores(logits, score_function) * chosen
        if score_function != "softmax" and topk > 1:
            probs = probs / (probs.sum(dim=-1, keepdim=True) + 1e-20)
    return probs * (scaling_factor or 1.0)


def _normed_scores(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    scores = _scores(logits, score_function)
    return scores if score_function == "softmax" else scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def _write_grad(
    function: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor, grad: torch.Tensor, out: torch.Tensor
) -> None:
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        (grad_logits,) = torch.autograd.grad(function(leaf), leaf, grad.float())
    out.copy_(grad_logits)


def _refuse(**wanted: object) -> None:
    for name, value in wanted.items():
        if value:
            raise NotImplementedError(f"the fused router with {name} has no stand-in on a CPU")


@dense("logits", "expert_bias", "topk_indices")
def fused_topk_with_score_function_fwd(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: int = 0,
    topk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns probabilities, 0 outside of the choice; the choice; and the values for backward."""
    _refuse(groups=group_topk, bitmaps=routing_map_format, indices=topk_indices is not None)
    values = logits.float()
    scores = _scores(values, score_function)
    if expert_bias is not None:
        assert expert_bias.dtype is torch.float32
        scores = scores + expert_bias
    chosen = _chosen(scores, topk)
    probs = _probs(values, chosen, topk, use_pre_softmax, scaling_factor, score_function)
    return probs.to(logits.dtype), chosen, values


@dense("routing_map", "intermediate_output", "grad_probs", "grad_logits")
def fused_topk_with_score_function_bwd(
    routing_map: torch.Tensor,
    intermediate_output: torch.Tensor,
    grad_probs: torch.Tensor,
    grad_logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    use_dense_indices: bool = False,
    routing_map_format: int = 0,
) -> None:
    """Writes the gradient of the logits."""
    _refuse(bitmaps=routing_map_format, indices=use_dense_indices)
    settings = routing_map, topk, use_pre_softmax, scaling_factor, score_function
    _write_grad(lambda logits: _probs(logits, *settings), intermediate_output, grad_probs, grad_logits)


@dense("logits")
def fused_score_for_moe_aux_loss_fwd(
    logits: torch.Tensor, topk: int, score_function: str, routing_map_format: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns scores of all experts in fp32, the choice without a bias, and the values for backward."""
    _refuse(bitmaps=routing_map_format)
    values = logits.float()
    scores = _normed_scores(values, score_function)
    return scores, _chosen(scores, topk), values


@dense("intermediate_output", "grad_scores", "grad_logits")
def fused_score_for_moe_aux_loss_bwd(
    intermediate_output: torch.Tensor,
    grad_scores: torch.Tensor,
    grad_logits: torch.Tensor,
    topk: int,
    score_function: str,
) -> None:
    """Writes the gradient of the logits."""
    _write_grad(lambda logits: _normed_scores(logits, score_function), intermediate_output, grad_scores, grad_logits)


@dense("probs", "tokens_per_expert")
def fused_moe_aux_loss_fwd(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the balancing loss of scores [rows, columns], and its coefficient."""
    factor = torch.tensor([num_experts * coeff / (topk * total_num_tokens**2), 0.0])
    return (factor[0] * (probs.float().sum(dim=0) * tokens_per_expert).sum()).to(probs.dtype), factor


@dense("probs", "tokens_per_expert", "total_num_tokens")
def fused_moe_aux_loss_fwd_graph_safe(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: torch.Tensor,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same, with the number of tokens in a tensor."""
    assert total_num_tokens.dtype is torch.int64
    sizes = num_experts, num_rows, num_cols, topk, coeff
    result: tuple[torch.Tensor, torch.Tensor] = fused_moe_aux_loss_fwd(
        probs, tokens_per_expert, int(total_num_tokens), *sizes
    )
    return result


@dense("Const_buf", "tokens_per_expert", "grad_aux_loss")
def fused_moe_aux_loss_bwd(
    Const_buf: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    num_rows: int,
    num_cols: int,
    grad_aux_loss: torch.Tensor,
) -> torch.Tensor:
    """Returns the gradient of the scores."""
    of_column = Const_buf[0] * tokens_per_expert * grad_aux_loss.float()
    return of_column.to(grad_aux_loss.dtype).expand(num_rows, num_cols).contiguous()
