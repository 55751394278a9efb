"""Enumerations and opaque types of ``transformer_engine_torch``, with its values where Python compares them."""

import enum
from collections.abc import Iterable
from typing import cast

import torch


def _enum(name: str, members: str | Iterable[str], prefix: str = "") -> type[enum.IntEnum]:
    words = members.split() if isinstance(members, str) else members
    members_by_name = {prefix + word: i for i, word in enumerate(words)}
    return cast(type[enum.IntEnum], enum.IntEnum(name, members_by_name))


class DType(enum.IntEnum):
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class NVTE_Fused_Attn_Backend(enum.IntEnum):  # noqa: N801 - the extension's name
    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


FP8FwdTensors = _enum("FP8FwdTensors", [f"GEMM{i}_{name}" for i in (1, 2, 3) for name in ("INPUT", "WEIGHT", "OUTPUT")])
FP8BwdTensors = _enum("FP8BwdTensors", [f"GRAD_{name}{i}" for i in (1, 2, 3) for name in ("OUTPUT", "INPUT")])
NVTE_Bias_Type = _enum("NVTE_Bias_Type", "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI", "NVTE_")
NVTE_Mask_Type = _enum(
    "NVTE_Mask_Type",
    "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    "NVTE_",
)
NVTE_Softmax_Type = _enum("NVTE_Softmax_Type", "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX", "NVTE_")
NVTE_QKV_Format = _enum(
    "NVTE_QKV_Format",
    "SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET",
    "NVTE_",
)
NVTE_QKV_Layout = _enum(
    "NVTE_QKV_Layout",
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD T3HD TH3D "
    "THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD Paged_KV_BSHD_BSHD_BSHD "
    "Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD Paged_KV_THD_BSHD_BSHD "
    "Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD QKV_Layout_NOT_SET",
    "NVTE_",
)
NVTEScalingMode = _enum(
    "NVTEScalingMode",
    "DELAYED_TENSOR_SCALING MXFP8_1D_SCALING BLOCK_SCALING_1D BLOCK_SCALING_2D NVFP4_1D_SCALING INVALID_SCALING",
    "NVTE_",
)
NVTERoutingMapFormat = _enum("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
NVTEQBHistogramMode = _enum("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC")
CommOverlapType = _enum("CommOverlapType", "RS AG")
Float8BlockScaleTensorFormat = _enum("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID")
CommOverlapAlgo = _enum(
    "CommOverlapAlgo",
    "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS "
    "ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
)


class FP8TensorMeta:
    """Delayed scaling's state of a module, as Transformer Engine's checkpoints pickle it."""

    scale: torch.Tensor
    amax_history: torch.Tensor


class CommOverlap:
    """Userbuffers of a communication that runs during a GEMM; here only for annotations."""


class CommOverlapP2P(CommOverlap):
    """The same, with sends and receives."""


class CommOverlapHelper:
    """Bootstrap of userbuffers; here only for annotations."""


TORCH_DTYPE = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def torch_dtype(dtype: "torch.dtype | int") -> torch.dtype:
    """Torch's name of a data type of the extension; torch's own pass."""
    return dtype if isinstance(dtype, torch.dtype) else TORCH_DTYPE[DType(int(dtype))]
