"""Small logs, played by hand."""

from dataclasses import replace

import pytest

from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.virtual_gpu.log import (
    CollectiveBegins,
    CollectiveEnds,
    HostWaits,
    Kernel,
    Recorded,
    StreamWaits,
)
from megatron_lancet.testkit.virtual_gpu.playback.device_model import DeviceModel
from megatron_lancet.testkit.virtual_gpu.playback.intervals import Interval
from megatron_lancet.testkit.virtual_gpu.playback.player import play

COMPUTE, COMM = 0, 1
DEVICE = DeviceModel(
    flops_per_s=1e6,
    bytes_per_s=1e6,
    min_kernel_us=1.0,
    launch_us=0.0,
    event_us=0.0,
    collective_us=0.0,
    host_wait_us=0.0,
    link=Link(5.0, 1e-3),
)
"""One FLOP, or one byte, a microsecond; a message of n bytes to others takes 5 + n microseconds."""


def kernel(us: int, stream: int = COMPUTE) -> Kernel:
    return Kernel(stream, "mm", us, 0)


def message(num_bytes: int, stream: int = COMM, group: str = "EP") -> list:
    begins = CollectiveBegins(stream, "all_to_all", group, 8, num_bytes)
    return [begins, Kernel(stream, "copy_", 0, 1000), CollectiveEnds(stream)]


def behind(event: int, first: int, then: int) -> list:
    return [Recorded(first, event), StreamWaits(then, event)]


def starts(played) -> list[float]:
    return [one.start_us for one in played.kernels.values()]


def test_kernel_takes_the_longest_of_flops_bytes_and_floor():
    log = [Kernel(COMPUTE, "mm", 7, 3), Kernel(COMPUTE, "add", 0, 4), Kernel(COMPUTE, "tiny", 0, 0)]
    assert list(play(log, DEVICE).kernels.values()) == [Interval(0, 7), Interval(7, 11), Interval(11, 12)]


def test_message_beside_compute_is_exposed_for_its_rest():
    # 10 us of compute, then a message of 5 + 15 us next to 12 us of compute, then 3 us that wait for it.
    log = [kernel(10), *behind(1, COMPUTE, COMM), *message(15), Recorded(COMM, 2), kernel(12)]
    played = play([*log, StreamWaits(COMPUTE, 2), kernel(3)], DEVICE)
    assert [one.on_wire for one in played.messages] == [Interval(10, 30)]
    assert starts(played) == [0, 10, 30]
    assert played.step_us == 33
    assert (played.busy_us, played.wire_us) == (25, 20)
    assert (played.for_messages_us, played.for_counts_us, played.for_launches_us) == (8, 0, 0)
    assert played.exposed_share == pytest.approx(8 / 20)


def test_message_on_the_compute_stream_is_exposed_in_full():
    played = play([kernel(10), *message(15, COMPUTE), kernel(5)], DEVICE)
    assert starts(played) == [0, 30]
    assert (played.for_messages_us, played.busy_us, played.exposed_share) == (20, 15, 1)


def test_messages_queue_for_the_link_of_their_group():
    of_one = play([*message(15), *message(15, 2)], DEVICE)
    of_two = play([*message(15), *message(15, 2, "TP")], DEVICE)
    assert [one.on_wire for one in of_one.messages] == [Interval(0, 20), Interval(20, 40)]
    assert [one.on_wire for one in of_two.messages] == [Interval(0, 20), Interval(0, 20)]


def test_group_has_the_link_of_its_name():
    device = DeviceModel(link=Link(1.0), links={"EP": Link(7.0)})
    played = play([*message(15), *message(15, 2, "TP")], device.with_launch_us(0))
    assert [one.on_wire.us for one in played.messages] == [7, 1]


def test_group_of_one_rank_has_no_message():
    log = [CollectiveBegins(COMPUTE, "all_reduce", "TP", 1, 0), CollectiveEnds(COMPUTE), kernel(3)]
    played = play(log, DEVICE)
    assert not played.messages
    assert played.step_us == 3


def test_short_kernels_start_as_fast_as_the_host_launches_them():
    device = DEVICE.with_launch_us(4)
    played = play([kernel(1)] * 3, device)
    assert starts(played) == [4, 8, 12]
    assert (played.step_us, played.busy_us, played.for_launches_us) == (13, 3, 10)


def test_long_kernels_hide_their_launches():
    assert starts(play([kernel(10)] * 3, DEVICE.with_launch_us(4))) == [4, 14, 24]


def test_host_that_waits_for_counts_leaves_compute_standing():
    # 4 us of compute, 5 + 3 us of counts; the host sees them 2 us later and only then launches 6 us of compute.
    counts = [*behind(1, COMPUTE, COMM), *message(3), Recorded(COMM, 2), HostWaits(2, None, "event", "")]
    device = DeviceModel(1e6, 1e6, 1.0, 0.0, 0.0, 0.0, host_wait_us=2.0, link=Link(5.0, 1e-3))
    played = play([kernel(4), *counts, kernel(6)], device)
    assert starts(played) == [0, 14]
    assert (played.for_messages_us, played.for_counts_us, played.for_launches_us) == (0, 10, 0)


def test_host_waits_for_stream_and_for_device():
    for waits in (HostWaits(None, 1, "stream", ""), HostWaits(None, None, "device", "")):
        assert starts(play([kernel(9, stream=1), waits, kernel(1)], DEVICE)) == [0, 9]


def test_wait_at_the_head_of_one_connection_stops_other_streams():
    # The message waits for compute, and compute that needs nothing is launched behind the wait.
    log = [kernel(10), Recorded(COMPUTE, 1), StreamWaits(2, 1), kernel(5, stream=3), *message(15, stream=2)]
    apart = play(log, DEVICE)
    shared = play(log, DeviceModel(**{**vars(DEVICE), "connections": 1}))
    assert starts(apart) == [0, 0]
    assert starts(shared) == [0, 10]
    assert [one.on_wire.start_us for one in shared.messages] == [10]


def test_one_connection_starts_launches_in_order():
    # A dispatch that is launched behind another chunk's experts starts when the last of them has started.
    log = [Recorded(COMPUTE, 1), kernel(10), kernel(10), StreamWaits(COMM, 1), *message(15)]
    apart = play(log, DEVICE)
    shared = play(log, DeviceModel(**{**vars(DEVICE), "connections": 1}))
    assert [one.on_wire.start_us for one in apart.messages] == [0]
    assert [one.on_wire.start_us for one in shared.messages] == [10]


def test_streams_share_connections_in_turn():
    log = [kernel(10, stream=4), Recorded(4, 1), StreamWaits(5, 1), kernel(1, stream=6), kernel(1, stream=5)]
    two = play(log, DeviceModel(**{**vars(DEVICE), "connections": 2}))
    assert starts(two) == [0, 0, 10]  # 4 and 6 share a queue, 5 has the other one


def test_event_from_before_the_log_has_been_reached():
    assert starts(play([StreamWaits(COMPUTE, 99), kernel(1)], DEVICE)) == [0]


def test_wait_for_another_streams_compute_is_not_exposed():
    log = [kernel(10, stream=2), Recorded(2, 1), StreamWaits(COMPUTE, 1), kernel(1)]
    played = play(log, DEVICE)
    assert (played.exposed_us, played.for_launches_us) == (0, 10)


SLOW = replace(DEVICE, num_sms=4, message_sms=1)
"""Next to a message, kernels run at three quarters of their speed."""


def beside_message(device):
    """10 us of compute, then a message of 5 + 15 us next to 12 us of compute, and 30 us more."""
    return play([kernel(10), *behind(1, COMPUTE, COMM), *message(15), kernel(12), kernel(30)], device)


def test_message_slows_down_kernels_of_other_streams():
    # 12 us take 16 during the message; of the last kernel 3 us take the 4 that are left, and 27 us come behind it.
    assert list(beside_message(SLOW).kernels.values()) == [Interval(0, 10), Interval(10, 26), Interval(26, 57)]
    assert list(beside_message(DEVICE).kernels.values()) == [Interval(0, 10), Interval(10, 22), Interval(22, 52)]


def test_message_slows_down_a_running_kernel_from_its_start():
    # The host launches the message last, and its stream has nothing to wait for: 5 + 7 us from the beginning.
    played = play([kernel(18), *message(7)], SLOW)
    assert [one.on_wire for one in played.messages] == [Interval(0, 12)]
    assert list(played.kernels.values()) == [Interval(0, 12 + 18 - 9)]


def test_message_does_not_slow_down_its_own_stream():
    log = [*message(15), kernel(15), *behind(1, COMPUTE, COMM), *message(5), kernel(2, COMM)]
    played = play(log, SLOW)
    assert [one.on_wire for one in played.messages] == [Interval(0, 20), Interval(20, 30)]
    assert list(played.kernels.values()) == [Interval(0, 20), Interval(30, 32)]


def test_messages_of_all_groups_queue_for_one_link_in_order():
    log = [kernel(9), *behind(1, COMPUTE, 2), *message(15, 2, "TP"), *message(15)]
    assert [one.on_wire for one in play(log, DEVICE).messages] == [Interval(9, 29), Interval(0, 20)]
    played = play(log, replace(DEVICE, one_link=True))
    assert [one.on_wire for one in played.messages] == [Interval(20, 40), Interval(0, 20)]
    assert [one.ready_us for one in played.messages] == [9, 0]


PERSISTENT = replace(SLOW, persistent=True)
"""A product has four blocks: three run beside a message, and the last one behind them."""


def test_product_beside_a_message_runs_in_two_waves():
    log = [Kernel(COMPUTE, "add", 0, 10), *behind(1, COMPUTE, COMM), *message(15), kernel(12), kernel(12)]
    assert list(play(log, PERSISTENT).kernels.values())[1:] == [Interval(10, 34), Interval(34, 46)]
    # With a block less there is one wave, of a third more, and so there is without a message.
    carved = replace(PERSISTENT, carveout_sms=1)
    assert list(play(log, carved).kernels.values())[1:] == [Interval(10, 26), Interval(26, 42)]


def test_message_waits_for_the_product_that_runs():
    log = [kernel(18), *message(7)]
    assert [one.on_wire for one in play(log, PERSISTENT).messages] == [Interval(18, 30)]
    assert [one.on_wire for one in play(log, replace(PERSISTENT, carveout_sms=1)).messages] == [Interval(0, 12)]
