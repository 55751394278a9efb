"""Kernels of the tests' Transformer Engine against autograd of the torch expression that each stands for."""

import pytest
import torch
from torch.nn import functional

from tests.te_cpu import extension as tex

ROWS, COLUMNS = 6, 8
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def gemm(a, trans_a, b, trans_b, out=None, dtype=None, bias=None, grad=False, accumulate=False, **extra):
    settings = (bias, None, False, None, grad, None, 0, accumulate, False)
    return tex.generic_gemm(a, trans_a, b, trans_b, out, None, dtype, *settings, **extra)


def test_te_gemm_is_a_linear_layer_and_its_gradients():
    weight, bias = randn(5, COLUMNS).requires_grad_(), randn(5).requires_grad_()
    rows = randn(2, 3, COLUMNS).requires_grad_()
    expected = functional.linear(rows, weight, bias)
    grad = randn(2, 3, 5)
    expected.backward(grad)
    out, *_ = gemm(weight.detach(), True, rows.detach(), False, bias=bias.detach())
    dgrad, *_ = gemm(weight.detach(), False, grad, False, grad=True)
    wgrad, bias_grad, *_ = gemm(rows.detach(), False, grad, True, bias=bias.detach(), grad=True)
    for actual, wanted in ((out, expected), (dgrad, rows.grad), (wgrad, weight.grad), (bias_grad, bias.grad)):
        torch.testing.assert_close(actual, wanted.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_te_gemm_accumulates_without_rounding_the_product(dtype):
    rows, grad = randn(ROWS, COLUMNS, dtype=dtype), randn(ROWS, 5, dtype=dtype)
    main_grad = randn(5, COLUMNS)
    expected = main_grad + grad.float().t() @ rows.float()
    out, *_ = gemm(rows, False, grad, True, out=main_grad, dtype=tex.DType.kFloat32, grad=True, accumulate=True)
    assert out is main_grad
    torch.testing.assert_close(main_grad, expected, atol=1e-6, rtol=1e-6)


def test_te_gemm_scales_by_alpha_and_beta():
    a, b, out = randn(5, COLUMNS), randn(ROWS, COLUMNS), randn(ROWS, 5)
    expected = 3 * b @ a.t() + 0.5 * out
    gemm(a, True, b, False, out=out, accumulate=True, alpha=3.0, beta=0.5)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("extra", [{"comm_overlap": object()}, {"gelu": True}])
def test_te_gemm_refuses_what_it_cannot_do(extra):
    settings = (None, None, extra.pop("gelu", False), None, False, None, 0, False, False)
    with pytest.raises(NotImplementedError, match="a GEMM with"):
        tex.generic_gemm(randn(5, 8), True, randn(6, 8), False, None, None, None, *settings, **extra)


@pytest.mark.parametrize("accumulate", [False, True])
def test_te_grouped_gemm_is_one_gemm_per_group(accumulate):
    rows = [randn(3, COLUMNS), randn(0, COLUMNS), randn(2, COLUMNS)]
    grads = [randn(3, 5), randn(0, 5), randn(2, 5)]
    wgrads, bias_grads = [torch.full((5, COLUMNS), 2.0) for _ in rows], [torch.full((5,), 7.0) for _ in rows]
    base = 2.0 if accumulate else 0.0
    flags = (True, torch.empty(0), 0, accumulate, False, 0)
    tex.te_general_grouped_gemm(
        *(rows, False, grads, True, wgrads, tex.DType.kFloat32, [3, 0, 2], bias_grads, tex.DType.kFloat32, False),
        *([torch.empty(0)], *flags),
    )
    for x, dy, wgrad, bias_grad in zip(rows, grads, wgrads, bias_grads, strict=True):
        torch.testing.assert_close(wgrad, base + dy.t() @ x)
        torch.testing.assert_close(bias_grad, dy.sum(dim=0))


def test_te_grouped_gemm_writes_one_output_for_all_groups():
    weights, rows, out = [randn(5, COLUMNS), 2 * randn(5, COLUMNS)], [randn(4, COLUMNS), randn(2, COLUMNS)], randn(6, 5)
    flags = (False, torch.empty(0), 0, False, False, 0)
    tex.te_general_grouped_gemm(
        *(weights, True, rows, False, [out], tex.DType.kFloat32, [4, 2], [torch.empty(0)] * 2, tex.DType.kFloat32),
        *(True, [torch.empty(0)], *flags),
    )
    torch.testing.assert_close(out, torch.cat([x @ w.t() for x, w in zip(rows, weights, strict=True)]))


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["layernorm", "rmsnorm"])
def test_te_norm_equals_autograd(normalization, zero_centered):
    x, weight, bias, grad = randn(ROWS, COLUMNS), randn(COLUMNS), randn(COLUMNS), randn(ROWS, COLUMNS) * 2
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    gamma = leaves[1] + 1 if zero_centered else leaves[1]
    settings = (EPS, None, None, tex.DType.kFloat32, 0, zero_centered)
    grads: tuple[torch.Tensor, ...]
    if normalization == "layernorm":
        expected = functional.layer_norm(leaves[0], (COLUMNS,), gamma, leaves[2], EPS)
        out, mean, rsigma = tex.layernorm_fwd(x, weight, bias, *settings)
        grads = tex.layernorm_bwd(grad, x, mean, rsigma, weight, 0, zero_centered)
    else:
        expected = functional.rms_norm(leaves[0], (COLUMNS,), gamma, EPS)
        out, mean, rsigma = tex.rmsnorm_fwd(x, weight, *settings)
        assert mean is None
        grads = tex.rmsnorm_bwd(grad, x, rsigma, weight, 0, zero_centered)
    expected.backward(grad)
    torch.testing.assert_close(out, expected.detach(), atol=1e-5, rtol=1e-5)
    for actual, leaf in zip(grads, leaves, strict=False):
        torch.testing.assert_close(actual, leaf.grad, atol=1e-5, rtol=1e-5)


def masked_scores(kind: str, scores: torch.Tensor) -> torch.Tensor:
    queries, keys = scores.shape[-2:]
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return scores if kind == "scaled_softmax" else scores.masked_fill(~causal, float("-inf"))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("scaled_softmax", (2, 3, 4, 6)),
        ("scaled_masked_softmax", (2, 3, 4, 6)),
        ("scaled_upper_triang_masked_softmax", (6, 4, 4)),
        ("scaled_aligned_causal_masked_softmax", (2, 3, 4, 6)),
    ],
)
def test_te_softmax_equals_autograd(kind, shape):
    scores, grad = randn(*shape).requires_grad_(), randn(*shape) * 3
    expected = torch.softmax(masked_scores(kind, 0.3 * scores), dim=-1)
    expected.backward(grad)
    mask = torch.ones(shape[-2:], dtype=torch.bool).triu(1 + shape[-1] - shape[-2])
    masks = [mask.expand(shape[0], 1, *mask.shape)] if kind == "scaled_masked_softmax" else []
    weights = getattr(tex, f"{kind}_forward")(scores.detach(), *masks, 0.3)
    torch.testing.assert_close(weights, expected.detach())
    torch.testing.assert_close(getattr(tex, f"{kind}_backward")(grad, weights, 0.3), scores.grad, atol=1e-6, rtol=1e-5)


def test_te_padding_of_rows_is_undone_by_unpadding():
    rows = randn(5, COLUMNS)
    padded, back = torch.full((8, COLUMNS), 9.0), torch.empty(5, COLUMNS)
    tex.fused_multi_row_padding(rows, padded, [2, 3], [4, 4])
    zeros = torch.zeros(1, COLUMNS)
    torch.testing.assert_close(padded, torch.cat([rows[:2], zeros, zeros, rows[2:], zeros]))
    tex.fused_multi_row_unpadding(padded, back, [4, 4], [2, 3])
    torch.testing.assert_close(back, rows)


def updated(history: list[float], reduced: float, algorithm: str = "max", scale: float = 5.0, margin: float = 0.0):
    """History and scale of e4m3, whose largest value is 448, after an update."""
    amaxes, scales = torch.tensor(history)[:, None], torch.tensor([scale])
    tex.fused_amax_and_scale_update_after_reduction(
        torch.tensor([reduced]), [amaxes], [scales], algorithm, tex.DType.kFloat8E4M3, margin
    )
    return amaxes.flatten().tolist(), scales.item()


@pytest.mark.parametrize(
    ("history", "reduced", "options", "expected"),
    [
        ([7.0, 2.0, 1.0], 7.0, {}, ([0.0, 1.0, 7.0], 64.0)),
        ([7.0, 2.0, 14.0], 7.0, {}, ([0.0, 14.0, 7.0], 32.0)),
        ([7.0, 2.0, 14.0], 7.0, {"algorithm": "most_recent"}, ([0.0, 14.0, 7.0], 64.0)),
        ([7.0, 2.0, 1.0], 14.0, {}, ([0.0, 1.0, 14.0], 32.0)),  # another rank's
        ([7.0, 2.0, 1.0], 7.0, {"margin": 1.0}, ([0.0, 1.0, 7.0], 32.0)),
        ([0.0, 2.0, 1.0], 0.0, {}, ([0.0, 2.0, 1.0], 5.0)),  # not cast since
        ([7.0], 7.0, {}, ([0.0], 64.0)),
        ([float("inf"), 0.0], float("inf"), {}, ([0.0, float("inf")], 5.0)),
    ],
)
def test_te_amax_history_moves_and_gives_the_scale(history, reduced, options, expected):
    assert updated(history, reduced, **options) == expected


def test_te_amax_histories_are_updated_together():
    histories, scales = [torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0]])], [torch.ones(2), torch.ones(1)]
    tex.fused_amax_and_scale_update_after_reduction(
        torch.tensor([1.0, 2.0, 4.0]), histories, scales, "max", tex.DType.kFloat8E5M2, 0.0
    )
    assert [scale.tolist() for scale in scales] == [[57344.0, 28672.0], [14336.0]]
