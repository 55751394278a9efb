"""Settings that GPU runs enable and CPU runs disable, and the comparisons with stock that enable them.

``training/platform/detect.py`` disables these arguments of Megatron, and so do the models of most tests. A unit test
checks that each argument is listed here, with a case or the reason why it has none.
"""

from typing import Any, NamedTuple

import torch

from tests.parity.gradients.variants import MLA, SEQUENCE, VARIANTS
from tests.parity.te.recompute_and_permutation_worker import CASES as PERMUTATION_CASES
from tests.parity.te.variants import FUSED, TE

Cut = tuple[int, dict[str, str]]
"""Number of chunks, and other fields of the plan."""
WHOLE: Cut = (1, {})
BATCH: Cut = (2, {})
IN_SEQUENCE: Cut = (2, SEQUENCE)

_TE = {**TE, "num_layers": 2}
_LOCAL: dict[str, Any] = {"num_layers": 2}
_SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
_SHARED = {"moe_shared_expert_intermediate_size": 48}
_ROPE = {"num_query_groups": 2, "position_embedding_type": "rope"}
_YARN = {**MLA, "rope_type": "yarn", "v_head_dim": 8}
"""Triton's block sizes are powers of 2."""
_ONE_EXPERT = VARIANTS["one-expert-per-rank"]


class Default(NamedTuple):
    """An argument of Megatron that a CPU run changes.

    Attributes:
        on: configuration fields that each case must set.
        cases: names in :data:`CASES`, or in another file.
        reason: why there is no case.
        test: file and name of a test of the argument, if it has no cases.
    """

    on: dict[str, Any]
    cases: tuple[str, ...] = ()
    reason: str = ""
    test: str = ""


MODELS: dict[str, tuple[dict[str, Any], tuple[Cut, ...]]] = {
    "persist-norm": (
        {**_LOCAL, "num_layers": 1, "hidden_size": 1024, "persist_layer_norm": True},  # the smallest size
        (WHOLE, BATCH),
    ),
    "masked-softmax": ({**_LOCAL, "masked_softmax_fusion": True, **_ROPE}, (WHOLE, BATCH)),
    "masked-softmax/bf16": ({**_LOCAL, "bf16": True, "masked_softmax_fusion": True, **_ROPE}, (WHOLE,)),
    "swiglu": ({**_TE, **_SWIGLU, **_SHARED, "bias_activation_fusion": True}, (WHOLE, BATCH, IN_SEQUENCE)),
    "swiglu/local": ({**_LOCAL, **_SWIGLU, "num_moe_experts": 8, "bias_activation_fusion": True}, (WHOLE, BATCH)),
    "bias-dropout": ({**_TE, "bias_dropout_fusion": True, "moe_layer_freq": [0, 1]}, (BATCH, IN_SEQUENCE)),
    "bias-dropout/drops": ({**_TE, "bias_dropout_fusion": True, "hidden_dropout": 0.1}, (WHOLE,)),
    "rope": ({**_TE, **_ROPE, "apply_rope_fusion": True}, (WHOLE, BATCH, IN_SEQUENCE)),
    "rope/interleaved": ({**_TE, **_ROPE, "rotary_interleaved": True, "apply_rope_fusion": True}, (IN_SEQUENCE,)),
    "rope/mtp": ({**_TE, **_ROPE, "mtp_num_layers": 1, "apply_rope_fusion": True}, (IN_SEQUENCE,)),
    "cross-entropy": ({**_TE, "cross_entropy_loss_fusion": True}, (WHOLE, BATCH)),
    "router": ({**_TE, "moe_router_fusion": True}, (WHOLE, BATCH, IN_SEQUENCE)),
    "router/sigmoid-seq-aux-loss": (
        {
            **_TE,
            **VARIANTS["sigmoid-expert-bias"],
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_router_fusion": True,
        },
        (WHOLE, BATCH, IN_SEQUENCE),
    ),
    "attention-backend": (
        {**_TE, **_ROPE, "attention_backend": "fused"},
        (WHOLE, BATCH, IN_SEQUENCE),
    ),
    "attention-backend/mla": ({**_TE, **MLA, "attention_backend": "fused"}, (BATCH, IN_SEQUENCE)),
    "fused-dw/local": ({**_LOCAL, **FUSED, "num_moe_experts": 4}, (WHOLE, BATCH)),
    "fused-dw/local/one-expert": ({**_LOCAL, **FUSED, **_ONE_EXPERT}, (WHOLE, IN_SEQUENCE)),
}
_FUSED_YARN = {**_YARN, "num_layers": 1, "num_attention_heads": 2, "apply_rope_fusion": True}
FEW_TOKENS: dict[str, tuple[dict[str, Any], tuple[Cut, ...]]] = {
    "rope/mla": ({**_TE, **_FUSED_YARN}, (WHOLE, BATCH, IN_SEQUENCE)),
    "rope/mla-local": ({**_LOCAL, **_FUSED_YARN}, (IN_SEQUENCE,)),
    "rope/mla-mtp": ({**_TE, **_FUSED_YARN, "mtp_num_layers": 1}, (IN_SEQUENCE,)),
}
"""Cases with kernels in Triton's interpreter, which needs milliseconds per position and head."""


def _named(
    models: dict[str, tuple[dict[str, Any], tuple[Cut, ...]]],
) -> dict[str, tuple[dict[str, Any], int, dict[str, str]]]:
    return {
        "/".join([name, f"k={num_chunks}", *cut.values()]): (overrides, num_chunks, cut)
        for name, (overrides, cuts) in models.items()
        for num_chunks, cut in cuts
    }


INTERPRETED = _named(FEW_TOKENS)
CASES = {**_named(MODELS), **INTERPRETED}
"""Overrides of the configuration, number of chunks, other fields of the plan."""


def _cases(*models: str) -> tuple[str, ...]:
    found = {**MODELS, **FEW_TOKENS}
    return tuple(name for model in models for name in _named({model: found[model]}))


DEFAULTS: dict[str, Default] = {
    "no_persist_layer_norm": Default({"persist_layer_norm": True}, _cases("persist-norm")),
    "masked_softmax_fusion": Default({"masked_softmax_fusion": True}, _cases("masked-softmax", "masked-softmax/bf16")),
    "bias_gelu_fusion": Default(
        {},
        reason="Megatron's experts refuse it; ours run the same function and refuse it too",
        test="tests/unit/model/local_experts/test_expert_kernels.py::test_fused_gelu_is_refused_by_experts",
    ),
    "bias_swiglu_fusion": Default(
        {"bias_activation_fusion": True, "gated_linear_unit": True}, _cases("swiglu", "swiglu/local")
    ),
    "bias_dropout_fusion": Default({"bias_dropout_fusion": True}, _cases("bias-dropout", "bias-dropout/drops")),
    "apply_rope_fusion": Default(
        {"apply_rope_fusion": True},
        _cases("rope", "rope/interleaved", "rope/mtp", "rope/mla", "rope/mla-local", "rope/mla-mtp"),
    ),
    "cross_entropy_loss_fusion": Default({"cross_entropy_loss_fusion": True}, _cases("cross-entropy")),
    "moe_router_fusion": Default({"moe_router_fusion": True}, _cases("router", "router/sigmoid-seq-aux-loss")),
    "use_te_activation_func": Default(
        {},
        reason="the overlap refuses it",
        test="tests/unit/training/plan/test_select.py::test_unsupported_settings_keep_stock_with_a_reason",
    ),
    "attention_backend": Default({"attention_backend": "fused"}, _cases("attention-backend", "attention-backend/mla")),
    "moe_permute_fusion": Default(
        {"moe_permute_fusion": True}, tuple(name for name in PERMUTATION_CASES if name.startswith("fused-permutation"))
    ),
    "gradient_accumulation_fusion": Default(
        {"gradient_accumulation_fusion": True}, _cases("fused-dw/local", "fused-dw/local/one-expert")
    ),
    "transformer_impl": Default({"te": True}, _cases("swiglu", "rope", "router", "attention-backend")),
    "use_flash_attn": Default(
        {},
        reason="no layer of Megatron reads it; --attention-backend decides",
        test="tests/unit/training/platform/test_gpu_defaults.py::test_no_layer_of_megatron_reads_use_flash_attn",
    ),
    "tp_comm_overlap": Default(
        {},
        reason="its buffers need CUDA's shared memory between devices, and the overlap refuses it",
        test="tests/unit/training/plan/test_select.py::test_unsupported_settings_keep_stock_with_a_reason",
    ),
    "distributed_backend": Default(
        {},
        reason="NCCL needs devices; transports on devices are tested on the virtual GPU and in tests/gpu",
        test="tests/gpu/test_ranks.py::test_gradients_of_ranks_equal_stock",
    ),
}
"""By name of Megatron's argument."""
