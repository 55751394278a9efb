"""The kernels that a GPU runs where torch and Megatron choose them by the device of a tensor, or compile them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_lancet.model.attention import sdpa
from megatron_lancet.patching import replaced
from megatron_lancet.runtime import weight_grad_store
from megatron_lancet.runtime.rows import sums as row_sums
from megatron_lancet.testkit.virtual_gpu.meta import MetaGpu
from megatron_lancet.training.megatron.virtual_gpu_patches import megatrons_kernels_of_a_gpu


@contextmanager
def kernels_of_a_gpu(gpu: MetaGpu) -> Iterator[None]:
    """Inside the context a model on the meta device enqueues what it would on a GPU."""
    with ExitStack() as stack:
        stack.enter_context(replaced(sdpa, "scaled_dot_product_attention", _fused_attention))
        stack.enter_context(replaced(sdpa, "causal_lower_right", lambda *_: None))
        stack.enter_context(replaced(torch.nn.functional, "rms_norm", _fused_rms_norm(gpu)))
        stack.enter_context(replaced(weight_grad_store, "_has_gemm_into_fp32", lambda device_type: True))
        stack.enter_context(replaced(row_sums, "sum_rows", _row_sums(gpu)))
        stack.enter_context(megatrons_kernels_of_a_gpu(gpu.run_as_one, _fused_rope(gpu)))
        yield


def _fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, scale: float, **_: Any
) -> torch.Tensor:
    """The fused kernel that torch chooses on a GPU; always causal here."""
    if query.size(-1) != value.size(-1):  # latent attention: flash attention takes equal sizes only
        wide: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, query.requires_grad, dropout_p, True, scale=scale
        )[0]
        return wide
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, True, scale=scale
    )[0]
    return output


def _row_sums(gpu: MetaGpu) -> Callable[..., torch.Tensor]:
    def sum_rows(rows_nH: torch.Tensor, order_n: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        sums_pH = rows_nH.new_empty((len(ends) - 1, rows_nH.size(1)))
        gpu.note_kernel("sum_rows", rows_nH.nbytes + sums_pH.nbytes + order_n.nbytes)
        return sums_pH

    return sum_rows


def _fused_rms_norm(gpu: MetaGpu) -> Callable[..., torch.Tensor]:
    """The kernels that torch has on a GPU; on the meta device it makes a dozen of each."""

    class RmsNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(input, weight)
            gpu.note_kernel("_fused_rms_norm", 2 * input.nbytes)
            return torch.empty_like(input)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            input, weight = ctx.saved_tensors
            gpu.note_kernel("_fused_rms_norm_backward", 3 * input.nbytes)
            gpu.note_kernel("_fused_rms_norm_backward", 2 * input.nbytes)
            return torch.empty_like(input), torch.empty_like(weight)

    def rms_norm(
        input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor, eps: float | None = None
    ) -> torch.Tensor:
        output: torch.Tensor = RmsNorm.apply(input, weight)
        return output

    return rms_norm


def _fused_rope(gpu: MetaGpu) -> Callable[..., torch.Tensor]:
    """Transformer Engine's kernel: one for each of query and key, forward and backward."""

    class Rope(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            ctx.num_bytes = 2 * rows.nbytes + positions.nbytes
            gpu.note_kernel("_fused_rope", ctx.num_bytes)
            return torch.empty_like(rows)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            gpu.note_kernel("_fused_rope_backward", ctx.num_bytes)
            return torch.empty_like(grad), None

    def rope(rows: torch.Tensor, positions: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
        rotated: torch.Tensor = Rope.apply(rows, positions)
        return rotated

    return rope
