"""Maps with replicas for servers."""

import random

import pytest

from megatron_lancet.planning.load.expert_load import ExpertLoad, LayerLoad
from megatron_lancet.planning.load.placement import most_over_mean, rows_of_ranks
from megatron_lancet.planning.load.server_map import ServerFormat, server_map, with_replicas


@pytest.mark.parametrize("seed", range(20))
def test_every_expert_has_a_place_and_replicas_even_the_ranks(seed):
    generator = random.Random(seed)
    ep_size = generator.choice((2, 4, 8))
    num_experts = ep_size * generator.randint(1, 4)
    num_replicas = ep_size * generator.randint(1, 3)
    rows = [generator.randint(0, 1000) for _ in range(num_experts)]
    slots = with_replicas(rows, num_replicas, ep_size)
    assert len(slots) == num_experts + num_replicas
    assert set(slots) == set(range(num_experts))
    assert with_replicas(rows, num_replicas, ep_size) == slots
    assert sum(rows_of_ranks(rows, slots, ep_size)) == pytest.approx(sum(rows))


def test_replicas_divide_what_a_placement_can_not():
    rows = [80, 10, 10, 10]
    assert most_over_mean(rows_of_ranks(rows, (0, 1, 2, 3), 2)) == pytest.approx(180 / 110)
    slots = with_replicas(rows, 2, 2)
    assert slots.count(0) == 3
    assert most_over_mean(rows_of_ranks(rows, slots, 2)) < 1.3


def test_replicas_of_an_expert_are_on_different_ranks():
    slots = with_replicas([90, 25, 25, 25], 4, 4)
    assert [slots[rank * 2 : rank * 2 + 2].count(0) for rank in range(4)] == [1, 1, 1, 1]


def test_places_that_can_not_be_spread_are_refused():
    with pytest.raises(ValueError, match="4 experts and 3 replicas can't be spread evenly over 2 ranks"):
        with_replicas([1, 2, 3, 4], 3, 2)


def test_each_server_gets_its_format():
    """Layers 2 and 3 of 3 have experts; layer 4 predicts further tokens and is not served."""
    load = ExpertLoad(1, 3, tuple(LayerLoad(layer, ((1, 1), (1, 1))) for layer in (2, 3, 4)))
    slots = {2: (0, 1, 0, 1), 3: (1, 0, 1, 1), 4: (0, 0, 0, 1)}
    assert server_map(load, slots, 2, ServerFormat.SGLANG) == {
        "physical_to_logical_map": [[0, 1, 0, 1], [0, 1, 0, 1], [1, 0, 1, 1]]
    }
    assert server_map(load, slots, 2, ServerFormat.VLLM) == {"physical_to_logical_map": [[0, 1, 0, 1], [1, 0, 1, 1]]}
    ascend = server_map(load, slots, 2, ServerFormat.VLLM_ASCEND)
    assert ascend["moe_layer_count"] == 2
    assert ascend["layer_list"][1] == {
        "layer_id": 1,
        "device_count": 2,
        "device_list": [{"device_id": 0, "device_expert": [1, 0]}, {"device_id": 1, "device_expert": [1, 1]}],
    }
