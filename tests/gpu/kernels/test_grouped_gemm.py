"""What local experts assume of torch's grouped GEMM: weights at distances, idle experts, and no wait of the host."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_lancet.model.local_experts.adjacent import AdjacentTensors
from megatron_lancet.model.local_experts.grouped_linear import multiply_together
from megatron_lancet.model.local_experts.row_groups import RowGroups
from megatron_lancet.runtime.device import has_grouped_gemm
from tests.gpu.devices import ON_BOTH

OUTPUTS, INPUTS, GAP = 256, 128, 64
SIZES = [[5, 3, 1, 7], [0, 300, 0, 3], [16, 0, 0, 0], [0, 0, 0, 9]]


@contextmanager
def host_never_waits(device) -> Iterator[None]:
    if device.is_virtual:
        before = len(device.gpu.host_waits)
        yield
        assert len(device.gpu.host_waits) == before
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ON_BOTH
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_grouped_products_of_experts_equal_their_own(device, sizes):
    """The weights lie as in DDP's buffer: the last expert first, with other weights between them."""
    buffer = torch.randn(len(sizes), OUTPUTS * INPUTS + GAP).to(torch.bfloat16).cuda()
    if not has_grouped_gemm(buffer):
        pytest.skip("this device multiplies group by group")
    weights = [row[: OUTPUTS * INPUTS].view(OUTPUTS, INPUTS) for row in reversed(buffer.unbind())]
    rows_mI = torch.randn(sum(sizes), INPUTS).to(torch.bfloat16).cuda()
    grad_mO = torch.randn(sum(sizes), OUTPUTS).to(torch.bfloat16).cuda()
    order = sizes[::-1]
    with device.watch(), host_never_waits(device):
        groups, adjacent = RowGroups(torch.tensor(sizes), rows_mI), AdjacentTensors()
        assert len(adjacent.runs(weights)) == 1
        output_mO = multiply_together(groups, adjacent, rows_mI, weights, True)
        grad_mI = multiply_together(groups, adjacent, grad_mO, weights, False)
        (group,) = groups.of([len(sizes)])
        dws_eOI = torch.nn.functional.grouped_mm(grad_mO.t(), rows_mI, offs=group.ends)
    expected = zip(rows_mI.split(order), grad_mO.split(order), reversed(weights), strict=True)
    products = [(rows @ weight.t(), grad @ weight, grad.t() @ rows) for rows, grad, weight in expected]
    outputs, grads, dws = zip(*products, strict=True)
    for ours, theirs in (
        (output_mO, torch.cat(outputs)),
        (grad_mI, torch.cat(grads)),
        (dws_eOI, torch.stack(dws)),
    ):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2)
    for dw_OI, size in zip(dws_eOI, order, strict=True):
        assert size or not dw_OI.any()
