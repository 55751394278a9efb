"""Maps with replicas of popular experts, for the static load balancing of servers.

A server has E logical experts and R redundant slots, E + R in all, as many on each rank. An expert's replicas share
its rows.

Formats, as their sources were read in November 2026:

- SGLang's ``--init-expert-location`` takes a JSON file with ``physical_to_logical_map``, a list for each layer of the
  model, dense ones included, of the logical expert in each physical slot (``python/sglang/srt/eplb/
  expert_location.py``, ``compute_initial_expert_location_metadata``); R is ``--ep-num-redundant-experts``.
- vLLM reads no file: its ``EPLBConfig`` (vllm/config/parallel.py, v0.19) has ``num_redundant_experts``, a window and an
  interval, and the map is found while serving. What is written is the value of ``EplbModelState.
  physical_to_logical_map``: a list for each layer with experts (vllm/distributed/eplb/eplb_state.py), for who sets it
  by code.
- vLLM Ascend reads a file, ``eplb_config.expert_map_path`` (its user guide, "Expert Parallelism Load Balancer",
  static EPLB): ``moe_layer_count`` and for each layer with experts the experts of each device.
"""

import heapq
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from megatron_lancet.planning.load.expert_load import ExpertLoad


class ServerFormat(StrEnum):
    """Who reads the map."""

    VLLM = "vllm"
    VLLM_ASCEND = "vllm-ascend"
    SGLANG = "sglang"


def with_replicas(rows_per_expert: Sequence[int], num_replicas: int, ep_size: int) -> tuple[int, ...]:
    """The logical expert of each slot, rank by rank.

    The next replica is always of the expert with most rows in a slot. Then slots are filled, largest first, onto the
    emptiest rank with room, if there is one that does not hold the expert yet.

    Args:
        num_replicas: R, in all.

    Raises:
        ValueError: the slots can't be spread evenly over the ranks.
    """
    num_slots = len(rows_per_expert) + num_replicas
    if num_slots % ep_size:
        raise ValueError(
            f"{len(rows_per_expert)} experts and {num_replicas} replicas can't be spread evenly over {ep_size} ranks"
        )
    copies = [1] * len(rows_per_expert)
    heap = [(-float(rows), expert) for expert, rows in enumerate(rows_per_expert)]
    heapq.heapify(heap)
    for _ in range(num_replicas):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        heapq.heappush(heap, (-rows_per_expert[expert] / copies[expert], expert))
    room = [num_slots // ep_size] * ep_size
    rows = [0.0] * ep_size
    held: list[list[int]] = [[] for _ in range(ep_size)]
    for share, expert in sorted(heap):
        for _ in range(copies[expert]):
            free = [rank for rank in range(ep_size) if room[rank]]
            rank = min(free, key=lambda rank: (expert in held[rank], rows[rank], rank))
            room[rank] -= 1
            rows[rank] -= share
            held[rank].append(expert)
    return tuple(expert for of_rank in held for expert in sorted(of_rank))


def server_map(
    load: ExpertLoad, placements: Mapping[int, Sequence[int]], ep_size: int, server: ServerFormat
) -> dict[str, Any]:
    """The content of a server's file, for ``json.dumps``.

    Args:
        load: of all layers with experts; those that predict further tokens are left out.
        placements: the logical expert of each slot, by layer.
    """
    moe_layers = [layer.layer for layer in load.layers if layer.layer <= load.num_layers]
    if server is ServerFormat.VLLM_ASCEND:
        layers = [_on_devices(index, placements[layer], ep_size) for index, layer in enumerate(moe_layers)]
        return {"moe_layer_count": len(layers), "layer_list": layers}
    if server is ServerFormat.VLLM:
        return {"physical_to_logical_map": [list(placements[layer]) for layer in moe_layers]}
    num_slots = len(placements[moe_layers[0]])
    unused = [slot % load.num_experts for slot in range(num_slots)]  # SGLang's own map, for dense layers
    return {"physical_to_logical_map": [list(placements.get(layer, unused)) for layer in range(1, load.num_layers + 1)]}


def server_map_text(content: Mapping[str, Any]) -> str:
    """The text of a server's file."""
    return json.dumps(content) + "\n"


def _on_devices(index: int, placement: Sequence[int], ep_size: int) -> dict[str, Any]:
    per_rank = len(placement) // ep_size
    devices = [
        {"device_id": rank, "device_expert": list(placement[rank * per_rank : (rank + 1) * per_rank])}
        for rank in range(ep_size)
    ]
    return {"layer_id": index, "device_count": ep_size, "device_list": devices}
