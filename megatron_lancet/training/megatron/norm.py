"""Layer norms that work under sequence parallelism without apex or Transformer Engine."""

import torch
from megatron.core.transformer import TransformerConfig

_NORMS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


def sequence_parallel_norm(config: TransformerConfig, hidden_size: int, eps: float) -> torch.nn.Module:
    """Build a torch norm over the last dimension whose gradients Megatron sums over the tensor-parallel ranks.

    Each rank norms its own part of the sequence with the same weights. The ``sequence_parallel`` attribute tells
    Megatron's ``finalize_model_grads`` that the ranks' gradients are partial sums.

    Raises:
        ValueError: torch has no such norm, or lacks one of its options.
    """
    norm = _NORMS.get(config.normalization)
    if norm is None or config.layernorm_zero_centered_gamma:
        raise ValueError(
            f"sequence parallelism without apex or Transformer Engine supports {sorted(_NORMS)}, not zero-centered; "
            f"got --normalization {config.normalization}"
            + (" --apply-layernorm-1p" if config.layernorm_zero_centered_gamma else "")
        )
    module = norm(hidden_size, eps=eps)
    for parameter in module.parameters():
        parameter.sequence_parallel = True
    return module
