"""Tensors of equally many rows in one message, and hidden states that travel there in fewer bytes than they have."""

from unittest import mock

import pytest
import torch

from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.exchange import RowSplits
from megatron_lancet.runtime.rows.packing import RowLayout, from_fp8, to_fp8
from megatron_lancet.schedule.comm_dtype import FP8_GROUP, CommDtype, RowFormat
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from tests.fakes import Loopback, cpu_stats

E4M3_MAX = 448
HALF_STEP = 2**-4
"""Largest error of e4m3, with its three bits behind the point, relative to a number that is not subnormal."""
HALF_SUBNORMAL_STEP = 2**-10


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize(
    "rows",
    [
        [((8,), torch.float32), ((), torch.float32)],
        [((7,), torch.bfloat16), ((), torch.float32)],  # 14 bytes: what follows must be aligned all the same
        [((), torch.float64), ((3, 2), torch.bfloat16), ((5,), torch.float32)],
    ],
    ids=["fp32", "bf16-odd", "three"],
)
def test_unpack_returns_the_packed_tensors(num_rows, rows):
    tensors = [torch.randn(num_rows, *shape).to(dtype) for shape, dtype in rows]
    layout = RowLayout.of(tensors)
    packed = layout.pack(tensors)
    assert packed.is_contiguous()
    assert len(packed) == num_rows
    for before, after in zip(tensors, layout.unpack(packed), strict=True):
        assert after.dtype == before.dtype
        assert after.equal(before)


def test_packed_rows_keep_their_place():
    """Any rows of a message are a message: it is cut between ranks, and comes in parts of several ranks."""
    tokens, probs = torch.arange(12.0).view(4, 3), torch.arange(4.0)
    layout = RowLayout.of((tokens, probs))
    packed = layout.pack((tokens, probs))
    some_tokens, some_probs = layout.unpack(torch.cat([packed[2:], packed[:1]]))
    assert some_tokens.equal(tokens[[2, 3, 0]])
    assert some_probs.equal(probs[[2, 3, 0]])


def test_pack_accepts_transposed_tensors():
    tokens, probs = torch.arange(12.0).view(3, 4).t(), torch.ones(4)
    layout = RowLayout.of((tokens, probs))
    assert layout.unpack(layout.pack((tokens, probs)))[0].equal(tokens)


def test_pack_does_not_copy_a_single_tensor():
    tensor = torch.ones(3, 2)
    layout = RowLayout.of((tensor,))
    assert layout.pack((tensor,)).data_ptr() == tensor.data_ptr()
    assert layout.unpack(tensor)[0].equal(tensor)


def round_trip(tensors, row_format):
    layout = RowLayout.of(tensors, row_format)
    return layout.unpack(layout.pack(tensors))


def error_bound(rows):
    """By element: half a step of its binade or, for the smallest numbers, of the subnormal ones; of scaled values."""
    groups = rows.double().abs().split(FP8_GROUP, dim=1)
    largest = torch.cat([group.amax(dim=1, keepdim=True).expand_as(group) for group in groups], dim=1)
    return torch.maximum(rows.double().abs() * HALF_STEP, largest / E4M3_MAX * HALF_SUBNORMAL_STEP) * (1 + 1e-6)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bf16_rows_are_rounded_to_bf16_and_the_others_are_exact(num_rows, dtype):
    hidden, probs = torch.randn(num_rows, 7, dtype=dtype), torch.rand(num_rows, 3)
    for tensors in ((hidden, probs), (hidden,)):
        got = round_trip(tensors, RowFormat.BF16)
        assert got[0].dtype == dtype
        assert got[0].equal(hidden.bfloat16().to(dtype))
        assert all(after.equal(before) for after, before in zip(got[1:], tensors[1:], strict=True))


@pytest.mark.parametrize("num_elements", [1, 96, FP8_GROUP, FP8_GROUP + 1, 3 * FP8_GROUP])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fp8_rows_are_within_half_a_step_of_their_group(num_elements, dtype):
    spread = torch.logspace(-6, 3, num_elements)  # a group's small values, and groups of different sizes
    hidden, probs = (torch.randn(6, num_elements) * spread).to(dtype), torch.rand(6)
    got_hidden, got_probs = round_trip((hidden, probs), RowFormat.FP8)
    assert got_probs.equal(probs)
    assert got_hidden.dtype == dtype
    error = (got_hidden.double() - hidden.double()).abs()
    rounding = 2**-8 * hidden.double().abs() if dtype is torch.bfloat16 else 0  # back to bf16
    assert (error <= error_bound(hidden) + rounding).all()
    if num_elements > 1:  # with one element each is the largest of its group, and exact
        assert error.max() > 0


@pytest.mark.parametrize(("dtype", "moved_by"), [(torch.float32, 2**-22), (torch.bfloat16, 3 * 2**-9)])
def test_second_hop_rounds_to_the_fp8_numbers_of_the_first(dtype, moved_by):
    """Between two hops rows have their type again: only its own rounding moves a value, and with it the scale."""
    spread = torch.logspace(-6, 3, 2 * FP8_GROUP + 1)
    hidden = (torch.randn(200, 2 * FP8_GROUP + 1) * spread).to(dtype)
    values, scales = to_fp8(hidden)
    once = from_fp8(values, scales, dtype)
    again, new_scales = to_fp8(once)
    assert again.float().equal(values.float())
    twice = from_fp8(again, new_scales, dtype)
    assert not once.equal(hidden)
    assert ((twice.double() - once.double()).abs() <= moved_by * once.double().abs()).all()
    (in_bf16,) = round_trip((hidden,), RowFormat.BF16)
    assert round_trip((in_bf16,), RowFormat.BF16)[0].equal(in_bf16)


def test_fp8_keeps_the_largest_value_of_each_group():
    hidden = torch.randn(4, 2 * FP8_GROUP)
    hidden[:, FP8_GROUP:] *= 1e-20
    values, scales = to_fp8(hidden)
    got = from_fp8(values, scales, torch.float32)
    assert values.float().abs().max() == E4M3_MAX
    for group, before in zip(got.split(FP8_GROUP, dim=1), hidden.split(FP8_GROUP, dim=1), strict=True):
        torch.testing.assert_close(group.abs().amax(1), before.abs().amax(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 1.0, 3.4e38])
def test_fp8_neither_overflows_nor_divides_by_zero(largest):
    hidden = torch.linspace(-1, 1, FP8_GROUP).mul(largest).unsqueeze(0)
    (got,) = round_trip((hidden,), RowFormat.FP8)
    assert got.isfinite().all()
    assert (got - hidden).abs().max() <= max(largest * HALF_STEP, 2e-38)  # below, fp32 itself is subnormal


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_infinite_value_stays_visible_in_its_group_only(bad):
    hidden = torch.randn(2, 2 * FP8_GROUP)
    hidden[1, 3] = bad
    (got,) = round_trip((hidden,), RowFormat.FP8)
    assert got[1, :FP8_GROUP].isnan().all()
    assert got[0].isfinite().all()
    assert got[1, FP8_GROUP:].isfinite().all()
    (got,) = round_trip((hidden,), RowFormat.BF16)
    torch.testing.assert_close(got, hidden.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


def test_rows_that_are_narrow_already_are_left_alone():
    hidden = torch.randn(3, 8).bfloat16()
    layout = RowLayout.of((hidden,), RowFormat.BF16)
    assert layout.row_format is RowFormat.EXACT
    assert layout.pack((hidden,)).data_ptr() == hidden.data_ptr()
    assert RowLayout.of((hidden.half(),), RowFormat.BF16).row_format is RowFormat.EXACT


@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.FP8])
def test_packing_changes_no_tensor_and_shares_no_memory(row_format):
    hidden, probs = torch.randn(3, FP8_GROUP), torch.rand(3)
    before = hidden.clone(), probs.clone()
    layout = RowLayout.of((hidden, probs), row_format)
    packed = layout.pack((hidden, probs))
    got = layout.unpack(packed)
    packed.zero_()
    assert hidden.equal(before[0])
    assert got[1].equal(probs)  # else it would keep the whole message alive
    assert probs.equal(before[1])
    assert got[0].any()


@pytest.mark.parametrize(
    ("comm_dtype", "dispatch_bytes", "others_bytes"),
    # 256 hidden states; in a dispatch two scales and a probability, each in 16 bytes
    [(CommDtype.EXACT, 1024 + 16, 1024), (CommDtype.FP8, 256 + 16 + 16, 512)],
)
def test_bytes_on_the_wire_are_those_of_the_narrow_rows(comm_dtype, dispatch_bytes, others_bytes):
    """Of dispatch and combine, forward and backward, in the counters and in the trace."""
    stats = cpu_stats()
    comm = Comm(Loopback(), None, stats, own_rank=0, comm_dtype=comm_dtype)
    comm.trace = mock.MagicMock()
    hidden = torch.randn(4, 256, requires_grad=True)
    probs = torch.rand(4, requires_grad=True)
    splits = RowSplits(sent=(1, 3), received=(1, 3))
    dispatch, combine = (
        AllToAll(comm, Op(1, 0, Phase.FORWARD, kind), splits) for kind in (OpKind.DISPATCH, OpKind.COMBINE)
    )
    rows, weights = dispatch.wait(dispatch.launch(hidden, probs))
    (output,) = combine.wait(combine.launch(rows * weights.unsqueeze(1)))
    output.sum().backward()
    num_bytes = {
        "L1.c0.F.dispatch": 3 * dispatch_bytes,
        "L1.c0.F.combine": 3 * others_bytes,
        "L1.c0.I.combine": 3 * others_bytes,
        "L1.c0.I.dispatch": 3 * (others_bytes + 16),  # with the gradient of the probability
    }
    assert {call.args[0]: call.args[1] for call in comm.trace.sent.call_args_list} == num_bytes
    assert stats.take().payload_bytes == sum(num_bytes.values())
