"""What a layer adds, from two logs that were made by hand."""

import pytest

from megatron_lancet.lab.modelled_step.figures import Depth, LayerCounts, Variant
from megatron_lancet.lab.modelled_step.recording import BACKWARD, Recording
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.virtual_gpu.log import CollectiveBegins, CollectiveEnds, Entry, HostWaits, Kernel, Mark
from megatron_lancet.testkit.virtual_gpu.playback.device_model import DeviceModel
from megatron_lancet.testkit.virtual_gpu.playback.marks import BEGIN, RESUME, SKIP, TURN_BEGINS, TURN_ENDS

DEVICE = DeviceModel(flops_per_s=1e6, link=Link(500.0)).with_launch_us(0)
"""One FLOP a microsecond."""
DW = "L1.W.mlp.linear_fc1"


def recording(num_layers: int) -> Recording:
    """Of each layer two kernels and a message of 0.5 ms forward, one kernel and two of a dW backward; and the ends."""
    exchange: list[Entry] = [CollectiveBegins(0, "all_to_all", "EP", 8, 0), Kernel(0, "copy_", 9, 9), CollectiveEnds(0)]
    forward: list[Entry] = [
        Kernel(0, "mm", 1000, 0),
        Kernel(0, "add", 500, 0),
        *exchange,
        HostWaits(None, 0, "event", ""),
    ]
    weight_grad: list[Entry] = [Mark(BEGIN, DW), Kernel(0, "mm", 1000, 0), Kernel(0, "add_", 500, 0), Mark(RESUME, DW)]
    backward: list[Entry] = [Kernel(0, "mm", 1500, 0), *weight_grad]
    head: list[Entry] = [Kernel(0, "mm", 2000, 0), Mark(SKIP, BACKWARD)]
    return Recording([*num_layers * forward, *head, *num_layers * backward], [])


def test_layer_counts_are_what_a_layer_adds():
    variant = Variant("plan", Depth(2, recording(2)), Depth(4, recording(4)))
    assert variant.counts() == LayerCounts(2, 3, 2, 1)


def test_layer_counts_of_a_whole_model_include_the_ends():
    whole = recording(4)
    assert Variant("plan", Depth(4, whole), Depth(4, whole)).counts() == LayerCounts(2.25, 3, 2, 1)


def test_step_is_scaled_to_the_layers_of_the_model():
    variant = Variant("plan", Depth(2, recording(2)), Depth(4, recording(4)))
    step = variant.step(DEVICE, 10)
    assert step.step_ms == pytest.approx(2 + 10 * 5)
    assert step.exposed_share == pytest.approx(1)


def test_step_of_a_whole_model_is_not_scaled():
    whole = recording(4)
    assert Variant("plan", Depth(4, whole), Depth(4, whole)).step(DEVICE, 4).step_ms == pytest.approx(2 + 4 * 5)


def step_in_pairs(num_layers: int, num_micro_batches: int) -> Recording:
    """A message next to the other pass of a pair takes no time, at the two ends it takes 0.5 ms a layer."""
    exchange: list[Entry] = [CollectiveBegins(0, "all_to_all", "EP", 8, 0), Kernel(0, "copy_", 9, 9), CollectiveEnds(0)]
    forward: list[Entry] = [Mark(TURN_BEGINS, ""), Kernel(0, "mm", 1000, 0), Kernel(0, "add", 1000, 0)]
    backward: list[Entry] = [Mark(TURN_ENDS, ""), Kernel(0, "mm", 3000, 0)]
    layer = [*forward, *backward]
    return Recording(
        [
            Mark(SKIP, BACKWARD),
            *num_layers * [*forward, *exchange],
            *(num_micro_batches - 1) * num_layers * layer,
            *num_layers * [*backward, *exchange],
        ],
        [],
        num_micro_batches,
    )


def depth_in_pairs(num_layers: int) -> Depth:
    return Depth(num_layers, step_in_pairs(num_layers, 4), step_in_pairs(num_layers, 3))


def test_step_in_pairs_is_that_of_micro_batch_with_two_partners():
    step = Variant("plan", depth_in_pairs(2), depth_in_pairs(4)).step(DEVICE, 10)
    assert step.step_ms == pytest.approx(10 * 5)
    assert step.exposed_share == 0


def test_ends_of_a_step_in_pairs_are_the_rest_of_its_time():
    assert Variant("plan", depth_in_pairs(2), depth_in_pairs(4)).step(DEVICE, 10).ends_ms == pytest.approx(10 * 2 * 0.5)


def test_layer_counts_in_pairs_are_of_one_micro_batch():
    assert Variant("plan", depth_in_pairs(2), depth_in_pairs(4)).counts() == LayerCounts(2, 1, 0, 0)
