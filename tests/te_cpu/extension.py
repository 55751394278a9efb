"""The module that stands in for ``transformer_engine_torch``: functions and enumerations, as far as they exist here.

Any other name can be imported, and raises by its name when it is called.
"""

from collections.abc import Callable
from typing import Any

from tests.te_cpu.attention import fused_attn_bwd, fused_attn_fwd, get_fused_attn_backend  # noqa: F401
from tests.te_cpu.enums import (  # noqa: F401 - names of the extension
    CommOverlap,
    CommOverlapAlgo,
    CommOverlapHelper,
    CommOverlapP2P,
    CommOverlapType,
    DType,
    Float8BlockScaleTensorFormat,
    FP8BwdTensors,
    FP8FwdTensors,
    FP8TensorMeta,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
    NVTEQBHistogramMode,
    NVTERoutingMapFormat,
    NVTEScalingMode,
)
from tests.te_cpu.fp8.per_tensor import (  # noqa: F401
    compute_amax,
    fp8_transpose,
    fused_amax_and_scale_update_after_reduction,
)
from tests.te_cpu.fp8.quantize import (  # noqa: F401
    bgrad_quantize,
    create_empty_quantized_tensor,
    dequantize,
    multi_tensor_quantize,
    multi_tensor_swizzle_scales_for_gemm_,
    multi_tensor_swizzle_scales_for_gemm_unchecked_,
    quantize,
    split_quantize,
    swizzle_scales_for_gemm_,
)
from tests.te_cpu.fused.rope import fused_rope_backward, fused_rope_forward  # noqa: F401
from tests.te_cpu.fused.router import (  # noqa: F401
    fused_moe_aux_loss_bwd,
    fused_moe_aux_loss_fwd,
    fused_moe_aux_loss_fwd_graph_safe,
    fused_score_for_moe_aux_loss_bwd,
    fused_score_for_moe_aux_loss_fwd,
    fused_topk_with_score_function_bwd,
    fused_topk_with_score_function_fwd,
)
from tests.te_cpu.gemm import (  # noqa: F401
    generic_gemm,
    get_cublasLt_version,
    get_cudnn_version,
    get_num_cublas_streams,
    te_general_grouped_gemm,
)
from tests.te_cpu.norms import layernorm_bwd, layernorm_fwd, rmsnorm_bwd, rmsnorm_fwd  # noqa: F401
from tests.te_cpu.optimizers import (  # noqa: F401
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_adam_param_remainder,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)
from tests.te_cpu.rows import (  # noqa: F401
    convert_bshd_to_thd,
    convert_thd_to_bshd,
    fused_multi_row_padding,
    fused_multi_row_unpadding,
)
from tests.te_cpu.softmax import (  # noqa: F401
    scaled_aligned_causal_masked_softmax_backward,
    scaled_aligned_causal_masked_softmax_forward,
    scaled_masked_softmax_backward,
    scaled_masked_softmax_forward,
    scaled_softmax_backward,
    scaled_softmax_forward,
    scaled_upper_triang_masked_softmax_backward,
    scaled_upper_triang_masked_softmax_forward,
)


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{name} has no stand-in on a CPU")

    missing.__name__ = name
    return missing
