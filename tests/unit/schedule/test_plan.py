import dataclasses
import itertools
import json

import pytest

from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, fixed_plan


def test_an_op_has_one_name():
    op = Op(layer=3, chunk=0, phase=Phase.FORWARD, kind="dispatch")
    assert str(op) == "L3.c0.F.dispatch"
    assert str(op.mirrored()) == "L3.c0.I.dispatch"


def test_text_and_json_of_a_plan():
    plan = Plan(num_chunks=2, dw_window=4)
    assert str(plan) == "chunks=2 dim=batch range=stack dw=fill dw-window=4"
    assert json.loads(plan.to_json()) == {
        "version": 2,
        "num_chunks": 2,
        "chunk_dim": "batch",
        "range": "stack",
        "dw_policy": "fill",
        "dw_window": 4,
        "dw_memory_bytes": None,
    }
    assert str(dataclasses.replace(plan, dw_memory_bytes=64_500_000)) == f"{plan} dw-memory=64.5MB"


def test_fingerprint_knows_every_field():
    plan = Plan(num_chunks=2, dw_window=4)
    others = [
        dataclasses.replace(plan, num_chunks=3),
        dataclasses.replace(plan, chunk_dim=ChunkDim.SEQUENCE),
        dataclasses.replace(plan, range=OverlapRange.GATE),
        dataclasses.replace(plan, dw_policy=DwPolicy.NONE),
        dataclasses.replace(plan, dw_window=5),
        dataclasses.replace(plan, dw_memory_bytes=1000),
    ]
    assert plan.fingerprint() == Plan(num_chunks=2, dw_window=4).fingerprint()
    assert len({other.fingerprint() for other in [plan, *others]}) == 7


@pytest.mark.parametrize(
    ("size", "num_chunks", "sizes"),
    [(4, 1, [4]), (4, 2, [2, 2]), (5, 2, [3, 2]), (7, 4, [2, 2, 2, 1]), (3, 3, [1, 1, 1])],
)
def test_chunks_are_as_equal_as_possible(size, num_chunks, sizes):
    assert Plan(num_chunks=num_chunks).chunk_sizes(size) == sizes


def test_chunks_take_turns_in_order():
    assert list(itertools.islice(Plan(num_chunks=3).turns(), 7)) == [0, 1, 2, 0, 1, 2, 0]


def test_a_fixed_plan_carries_a_dw_over_one_layer():
    # Dispatch and combine of each chunk.
    assert fixed_plan(3) == Plan(3, ChunkDim.BATCH, OverlapRange.STACK, DwPolicy.FILL, dw_window=6)
    assert fixed_plan(3, DwPolicy.NONE).dw_window == 0
