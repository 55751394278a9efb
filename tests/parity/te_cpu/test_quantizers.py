"""Fp8 as Transformer Engine's Python and the tests' kernels do it, against torch's casts and values worked by hand."""

import traceback

import pytest
import torch
import torch.distributed as dist

from tests.ranks import launch

pytestmark = pytest.mark.distributed

E4M3 = torch.float8_e4m3fn
LIMIT = 448.0


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def capability() -> int:
    """By which GEMMs read fp8 in one layout (9) or in any (10)."""
    return torch.cuda.get_device_capability()[0]


def fp8(values: torch.Tensor) -> torch.Tensor:
    """Bytes of torch's own cast, of values that fp8 has."""
    return values.to(E4M3).view(torch.uint8)


def delayed(scale: float = 1.0):
    from transformer_engine.pytorch import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    return Float8Quantizer(torch.tensor([scale]), torch.zeros(1), DType.kFloat8E4M3)


def current(**settings):
    from transformer_engine.pytorch import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    return Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu"), **settings)


def blockwise(dim: int, rowwise: bool = True, columnwise: bool = True, **settings):
    from transformer_engine.pytorch import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    usages = {"rowwise": rowwise, "columnwise": columnwise}
    return Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=dim, **usages, **settings)


def mxfp8():
    from transformer_engine.pytorch import DType
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    return MXFP8Quantizer(DType.kFloat8E4M3)


def check_delayed_scaling_casts_by_its_scale_and_collects_amax():
    quantizer, x = delayed(scale=4.0), randn(6, 16)
    tensor = quantizer(x)
    torch.testing.assert_close(tensor._data, fp8(4 * x), atol=0, rtol=0)
    assert tensor._scale_inv.item() == 0.25
    assert quantizer.amax.item() == x.abs().max()
    quantizer(x / 2)
    assert quantizer.amax.item() == x.abs().max()
    torch.testing.assert_close(tensor.dequantize(), (4 * x).to(E4M3).float() / 4, atol=0, rtol=0)
    if capability() == 9:
        torch.testing.assert_close(tensor._transpose, tensor._data.t().contiguous(), atol=0, rtol=0)
    else:
        assert tensor._transpose is None


def check_casts_saturate_and_keep_nan():
    values = delayed()(torch.tensor([[500.0, -1e9, float("inf"), 464.0, 3e-3] + [0.0] * 11])).dequantize()
    assert values[0, :4].tolist() == [LIMIT, -LIMIT, LIMIT, LIMIT]
    assert values[0, 4].item() == 2**-9 * 2  # the second of the subnormal numbers
    assert delayed()(torch.full((1, 16), float("nan"))).dequantize().isnan().all()


def check_a_cast_into_a_tensor_obeys_noop():
    quantizer = delayed()
    tensor = quantizer(torch.ones(2, 16))
    quantizer.update_quantized(torch.zeros(2, 16), tensor, noop_flag=torch.ones(1))
    assert tensor.dequantize().eq(1).all()
    quantizer.update_quantized(torch.zeros(2, 16), tensor, noop_flag=torch.zeros(1))
    assert tensor.dequantize().eq(0).all()


def check_current_scaling_uses_the_whole_range():
    x = randn(6, 16)
    tensor = current()(x)
    scale = LIMIT / x.abs().max()
    torch.testing.assert_close(tensor._data, fp8((x * scale).clamp(-LIMIT, LIMIT)), atol=0, rtol=0)
    torch.testing.assert_close(tensor._scale_inv.item(), 1 / scale.item(), atol=0, rtol=1e-6)
    of_3 = torch.full((2, 16), 3.0)
    assert current(force_pow_2_scales=True)(of_3)._scale_inv.item() == 2.0**-7  # 448 / 3 is 149: 128
    assert current(amax_epsilon=7.0)(of_3)._scale_inv.item() == 7 / LIMIT
    assert current()(torch.zeros(2, 16))._scale_inv.item() == 1.0


def check_current_scaling_takes_the_largest_of_all_ranks():
    x = torch.full((2, 16), 7.0 * (1 + dist.get_rank()))
    tensor = current(with_amax_reduction=True, amax_reduction_group=dist.group.WORLD)(x)
    assert tensor._scale_inv.item() == 14 / LIMIT


def check_delayed_scaling_of_a_linear_layer_follows_amax_of_all_ranks():
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    layer = te.Linear(16, 16, bias=False, params_dtype=torch.float32)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=2, amax_compute_algo="max")
    seen = []
    for largest in (7.0, 3.5, 1.75, 1.75):
        x = torch.full((16, 16), largest if dist.get_rank() else 0.5)
        with te.autocast(enabled=True, recipe=recipe, amax_reduction_group=dist.group.WORLD):
            layer(x).sum().backward()
        seen.append(layer.fp8_meta["scaling_fwd"].scale[0].item())
    assert seen == [LIMIT / 7, LIMIT / 7, LIMIT / 3.5, LIMIT / 1.75], seen


def lines_by_hand(lines: torch.Tensor) -> torch.Tensor:
    """Lines in blocks of 128, each scaled by a power of 2 to the range of fp8, rounded, and scaled back."""
    result = torch.empty_like(lines)
    for start in range(0, lines.shape[1], 128):
        block = lines[:, start : start + 128]
        scale = 2 ** torch.floor(torch.log2(LIMIT / block.abs().amax(dim=1, keepdim=True)))
        result[:, start : start + 128] = (block * scale).to(E4M3).float() / scale
    return result


def check_block_scaling_of_lines():
    from tests.te_cpu.fp8.quantize import values

    x = randn(132, 260) * torch.logspace(-3, 3, 260)
    tensor = blockwise(1)(x)
    assert tuple(tensor._rowwise_scale_inv.shape) == (3, 132)
    assert tuple(tensor._columnwise_scale_inv.shape) == (2, 260)
    torch.testing.assert_close(values(tensor, True), lines_by_hand(x), atol=0, rtol=0)
    torch.testing.assert_close(values(tensor, False), lines_by_hand(x.t()).t(), atol=0, rtol=0)
    # Transformer Engine's own Python reads the layout, too.
    torch.testing.assert_close(tensor.dequantize(), values(tensor, True), atol=0, rtol=0)
    columns = blockwise(1, rowwise=False)(x)
    torch.testing.assert_close(columns.dequantize(), values(tensor, False), atol=0, rtol=0)


def check_block_scaling_of_squares():
    from tests.te_cpu.fp8.quantize import values

    x = randn(132, 260) * torch.logspace(-3, 3, 260)
    tensor = blockwise(2)(x)
    by_hand = torch.empty_like(x)
    for i in range(0, 132, 128):
        for j in range(0, 260, 128):
            square = x[i : i + 128, j : j + 128]
            scale = 2 ** torch.floor(torch.log2(LIMIT / square.abs().max()))
            by_hand[i : i + 128, j : j + 128] = (square * scale).to(E4M3).float() / scale
    for result in (values(tensor, True), values(tensor, False), tensor.dequantize()):
        torch.testing.assert_close(result, by_hand, atol=0, rtol=0)
    # Its own Python derives column-wise data from row-wise ones.
    rows = blockwise(2, columnwise=False)(x)
    rows.update_usage(columnwise_usage=True)
    torch.testing.assert_close(values(rows, False), by_hand, atol=0, rtol=0)


def check_block_scaling_without_powers_of_2():
    tensor = blockwise(1, force_pow_2_scales=False, amax_epsilon=0.0)(torch.full((4, 128), 3.0))
    torch.testing.assert_close(tensor._rowwise_scale_inv, torch.full((1, 4), 3 / LIMIT), atol=0, rtol=1e-6)
    assert tensor._rowwise_data.eq(0x7E).all()  # 448


def check_mxfp8_has_a_power_of_2_per_32_elements():
    from tests.te_cpu.fp8.quantize import values

    x = torch.zeros(32, 64)
    x[0, :32], x[0, 32:] = 1.0, 448.0
    x[1, 0], x[1, 32], x[2, 0] = 449.0, 1e-30, 0.3
    tensor = mxfp8()(x)
    scales = tensor._rowwise_scale_inv
    assert tuple(scales.shape) == (128, 4)
    assert tuple(tensor._columnwise_scale_inv.shape) == (4, 128)
    # 1 / 448 is above 2**-9, so its block has 2**-8: exponents are rounded up, with 127 for 2**0.
    assert scales[0, :2].tolist() == [119, 127]
    assert scales[1, :2].tolist() == [128, 19]
    assert scales[2, :2].tolist() == [117, 0]
    by_hand = x / torch.exp2(scales[:32, :2].float() - 127).repeat_interleave(32, 1)
    torch.testing.assert_close(tensor._rowwise_data, fp8(by_hand), atol=0, rtol=0)
    y = randn(64, 96) * torch.logspace(-4, 4, 96)
    tensor = mxfp8()(y)
    columns = mxfp8()(y.t().contiguous())
    torch.testing.assert_close(values(tensor, False), values(columns, True).t(), atol=0, rtol=0)
    assert not torch.equal(values(tensor, False), values(tensor, True))
    torch.testing.assert_close(tensor.dequantize(), values(tensor, True), atol=0, rtol=0)
    assert ((tensor.dequantize() - y).abs() <= 2**-4 * y.abs().view(64, 3, 32).amax(2).repeat_interleave(32, 1)).all()


def check_gemms_read_the_layout_that_a_gpu_reads():
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    from tests.te_cpu.fp8.quantize import values

    weight, rows, grad = randn(128, 64, seed=1), randn(32, 64, seed=2), randn(32, 128, seed=3)
    quantizers = [delayed, current, lambda: blockwise(1)] + ([mxfp8] if capability() == 10 else [])
    for new in quantizers:
        w, x, dy = (new()(tensor) for tensor in (weight, rows, grad))
        rowwise = {name: values(tensor, True) for name, tensor in (("w", w), ("x", x), ("dy", dy))}
        columnwise = {name: values(tensor, False) for name, tensor in (("w", w), ("x", x), ("dy", dy))}
        for layout, a, b, expected in (
            ("TN", w, x, rowwise["x"] @ rowwise["w"].t()),
            ("NN", w, dy, rowwise["dy"] @ columnwise["w"]),
            ("NT", x, dy, columnwise["dy"].t() @ columnwise["x"]),
        ):
            out, *_ = general_gemm(a, b, out_dtype=torch.float32, layout=layout)
            torch.testing.assert_close(out, expected)


def check_what_a_tensor_lacks_is_refused():
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    from tests.te_cpu.fp8.quantize import values

    for call, error, words in (
        (lambda: NVFP4Quantizer()(torch.ones(32, 32)), NotImplementedError, "NVFP4Quantizer has no stand-in"),
        (lambda: values(blockwise(1, columnwise=False)(torch.ones(4, 128)), False), AssertionError, "no columnwise"),
        (lambda: mxfp8()(torch.ones(33, 32)), (RuntimeError, AssertionError, ValueError), "32"),
    ):
        with pytest.raises(error, match=words):
            call()


def check_recomputation_in_fp8_changes_nothing():
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

    def gradients(recipe, recompute: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        layer = te.LayerNormLinear(32, 32, params_dtype=torch.float32)

        def forward(x):
            return torch.nn.functional.dropout(layer(x), 0.5)

        for step in range(3):
            x = randn(16, 32, seed=step).requires_grad_()
            with te.autocast(enabled=True, recipe=recipe):
                out = te.checkpoint(forward, x) if recompute else forward(x)
            out.square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in layer.parameters())]

    for recipe in (DelayedScaling(), Float8CurrentScaling()):
        torch.testing.assert_close(gradients(recipe, True), gradients(recipe, False), atol=0, rtol=0)


def check_the_random_state_tracker_returns_to_its_states():
    from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(3)
    plain = torch.rand(4)
    tracker.add("model-parallel-rng", 11)
    with tracker.fork("model-parallel-rng"):
        first = torch.rand(4)
        again = torch.rand(4)
    torch.manual_seed(11)
    torch.testing.assert_close([first, again], [torch.rand(4), torch.rand(4)], atol=0, rtol=0)
    torch.manual_seed(3)
    with tracker.fork("model-parallel-rng"):
        third = torch.rand(4)
    torch.testing.assert_close(torch.rand(4), plain, atol=0, rtol=0)
    assert not torch.equal(third, again)


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}


def tracebacks() -> dict[str, str]:
    """Each check's traceback; empty if it passes."""
    results = {}
    for name, check in CHECKS.items():
        try:
            check()
            results[name] = ""
        except Exception:  # noqa: BLE001 - the test fails with it
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module", params=[9, 10], ids=["capability9", "capability10"])
def results(request, tmp_path_factory):
    """Each check's traceback, on both ranks."""
    return launch.results_of(
        tracebacks, 2, tmp_path_factory.mktemp("quantizers"), 100, te=launch.Te((request.param, 0))
    )


@pytest.mark.parametrize("check", CHECKS)
def test_te_quantizer(results, check):
    assert [rank[check] for rank in results] == ["", ""]
