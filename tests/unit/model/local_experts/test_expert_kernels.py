"""How many kernels a MoE layer's experts launch on CUDA: one after the other as stock, and by grouped GEMMs."""

from collections import Counter

import pytest
import torch

from megatron_lancet.model.local_experts import grouped_linear
from megatron_lancet.patching import replaced
from megatron_lancet.runtime import device
from tests.kernel_counts import kernels
from tests.unit.model.local_experts.pair import BF16, Pair

NUM_EXPERTS, ROWS_PER_EXPERT = 16, 3
SWIGLU = {**BF16, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
FUSED = {**SWIGLU, "bias_activation_fusion": True}


def kernels_of(pair: Pair, rows: list[int]) -> tuple[int, int, int]:
    """Kernels of the forward pass, of the backward pass without dW, and of dW where it is deferred."""
    tokens, probs, grad = pair.inputs(rows)
    tokens.requires_grad_(), probs.requires_grad_()
    with kernels() as forward:
        output, _ = pair.ours(tokens, torch.tensor(rows), probs)
    late: Counter[str] = Counter()
    flush = pair.store.flush

    def counted_flush() -> None:
        with kernels() as found:
            flush()
        late.update(found)

    with replaced(pair.store, "flush", counted_flush), kernels() as backward:
        output.backward(grad)
    return forward.total(), backward.total() - late.total(), late.total()


SEQUENTIAL, ONE_BY_ONE, GROUPED = "sequential", "layer by layer, one GEMM for each expert", "grouped"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (SWIGLU, {SEQUENTIAL: (113, 178, 64), ONE_BY_ONE: (37, 41, 64), GROUPED: (7, 11, 4)}),
        # The operators of Megatron's fused activation, which is one kernel each way where it is compiled.
        (FUSED, {SEQUENTIAL: (97, 322, 64), ONE_BY_ONE: (36, 50, 64), GROUPED: (6, 20, 4)}),
    ],
    ids=["swiglu", "fused swiglu"],
)
def test_kernels_of_sixteen_experts_by_forward_backward_and_dws(one_rank, settings, expected):
    rows = [ROWS_PER_EXPERT] * NUM_EXPERTS
    found = {}
    for way in expected:
        with (
            replaced(device, "_is_cuda", lambda device, way=way: way != SEQUENTIAL),
            replaced(grouped_linear, "has_grouped_gemm", lambda weight, way=way: way == GROUPED),
        ):
            pair = Pair(NUM_EXPERTS, **settings)
            pair.ours.may_group = way != SEQUENTIAL
            pair.run(rows)
            found[way] = kernels_of(pair, rows)
    assert found == expected


def test_fused_gelu_is_refused_by_experts(one_rank):
    """Megatron has no fused GELU that weights rows by probability; ours refuse it in either order."""
    pair = Pair(2, add_bias_linear=True, bias_activation_fusion=True)
    tokens, probs, _ = pair.inputs([3, 3])
    for experts, may_group in ((pair.stock, None), (pair.ours, False), (pair.ours, True)):
        if may_group is not None:
            experts.may_group = may_group
        with pytest.raises(ValueError, match="Only support fusion of swiglu and quick_gelu"):
            experts(tokens, torch.tensor([3, 3]), probs)
