"""Marks in a log become a timeline, and count kernels by op."""

from megatron_lancet.schedule.timeline import Lane, Span
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.virtual_gpu.log import (
    CollectiveBegins,
    CollectiveEnds,
    Kernel,
    Mark,
    Recorded,
    StreamWaits,
)
from megatron_lancet.testkit.virtual_gpu.playback.by_op import kernels_by_op, timeline_of
from megatron_lancet.testkit.virtual_gpu.playback.device_model import DeviceModel
from megatron_lancet.testkit.virtual_gpu.playback.marks import BEGIN, END, RESUME, SKIP, MarkedMessage
from megatron_lancet.testkit.virtual_gpu.playback.player import play

COMPUTE, COMM = 0, 1
DISPATCH, DW = "L1.c0.F.dispatch", "L1.W.mlp.linear_fc1"
# 1 ms of attention, a message of 3 ms next to 1 ms of routing, a wait, 0.5 ms of a weight gradient, 2 ms of experts.
LOG = [
    Kernel(COMPUTE, "sum", 100, 0),
    Mark(SKIP, ""),
    Kernel(COMPUTE, "mm", 500, 0),
    Kernel(COMPUTE, "add", 500, 0),
    Mark(END, "L1.c0.F.attention"),
    Recorded(COMPUTE, 1),
    StreamWaits(COMM, 1),
    Recorded(COMM, 2),
    CollectiveBegins(COMM, "all_to_all", "EP", 8, 4096),
    Kernel(COMM, "copy_", 0, 0),
    CollectiveEnds(COMM),
    Recorded(COMM, 3),
    Kernel(COMPUTE, "mm", 1000, 0),
    Mark(END, "L1.c0.F.route"),
    Mark(BEGIN, DISPATCH),
    StreamWaits(COMPUTE, 3),
    Mark(RESUME, DISPATCH),
    Mark(BEGIN, DW),
    Kernel(COMPUTE, "mm", 500, 0),
    Mark(RESUME, DW),
    Kernel(COMPUTE, "mm", 2000, 0),
    Mark(END, "L1.c0.F.experts"),
    Kernel(COMPUTE, "mul", 100, 0),
]
DEVICE = DeviceModel(flops_per_s=1e6, link=Link(3000.0)).with_launch_us(0)
"""One FLOP a microsecond."""


def test_timeline_has_ops_waits_weight_grads_and_messages():
    timeline = timeline_of(play(LOG, DEVICE), [MarkedMessage(DISPATCH, 4096, 2, 3)])
    rounded = [Span(s.name, s.lane, round(s.start_ms, 6), round(s.end_ms, 6), s.num_bytes) for s in timeline.spans]
    assert rounded == [
        Span("L1.c0.F.attention", Lane.COMPUTE, 0.1, 1.1),
        Span("L1.c0.F.route", Lane.COMPUTE, 1.1, 2.1),
        Span(DISPATCH, Lane.COMM, 1.1, 4.1, 4096),
        Span(DISPATCH, Lane.WAIT, 2.1, 4.1),
        Span(DW, Lane.COMPUTE, 4.1, 4.6),
        Span("L1.c0.F.experts", Lane.COMPUTE, 4.6, 6.6),
    ]
    assert round(timeline.step_ms, 6) == 6.7
    assert round(timeline.exposed_ms(), 6) == 2.0


def test_kernels_belong_to_the_op_that_ends_behind_them():
    assert kernels_by_op(LOG) == {
        "": 2,  # in front of the first op, and behind the last
        "L1.c0.F.attention": 2,
        "L1.c0.F.route": 1,
        DW: 1,
        "L1.c0.F.experts": 1,
    }
