"""The part of the check that runs each path once and counts the host's waits."""

from functools import partial

import pytest
import torch

from benchmarks.gpu.check.part import smoke, tuner, waits
from benchmarks.gpu.check.place import rehearsal
from benchmarks.gpu.variants import MEGATRON_OVERLAP, PLANS
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.patching import around
from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.trace import Trace
from megatron_lancet.schedule.plan import OverlapRange, Plan, Segment, fixed_plan, paired
from tests.gpu.check.rehearsed import rehearsed, rehearsed_command

PATH = "ours k=1"


FEW = ("stock", "ours k=2", "tiles", "capacity, padded, k=1", "traced")
"""Paths with different numbers of waits; ``tests/virtual_gpu`` counts the waits of all plans."""


def check_waits(counted):
    for name, result in counted.items():
        assert result["ok"]
        assert result["ms"] > 0
        assert result["waits_expected"] in (None, result["waits"])
        assert (result["waits_expected"] is None) == name.startswith("stock")
    assert counted["ours k=2"]["waits_per_layer_and_chunk"] == 1
    assert counted["tiles"]["waits_per_layer_and_chunk"] == 2
    assert counted["capacity, padded, k=1"]["waits"] == 0
    assert counted["traced"]["num_spans"] > 100


def test_paths_run_and_the_host_waits_as_often_as_expected(tmp_path):
    found = rehearsed(smoke_of(*FEW), tmp_path)
    assert set(found) == set(FEW)
    check_waits(found)


@pytest.mark.nightly
@pytest.mark.timeout(700)
def test_all_paths_run_by_the_command(tmp_path):
    found = rehearsed_command("smoke", tmp_path)
    assert list(found)[: len(PLANS)] == list(PLANS)
    left_out = [name for name, result in found.items() if "left_out" in result]
    assert left_out == [MEGATRON_OVERLAP]
    counted = {name: result for name, result in found.items() if "waits" in result}
    assert len(counted) == len(found) - len(left_out) - len(tuner.JOBS)
    check_waits(counted)
    assert sum(name.startswith("switched plans") for name in found) == 4
    (profile,) = (found[name] for name in tuner.JOBS)
    assert profile["compute_slowdown"] >= 1
    assert profile["room_mb"] > 0


def smoke_of(*names):
    return partial(smoke.run, names=names)


def test_wait_in_the_backward_is_an_error(tmp_path):
    def launch(stock, *args):
        torch.cuda.synchronize()
        stock(*args)

    with around(AllToAll, "_launch_backward", launch):
        found = rehearsed(smoke_of(PATH), tmp_path)
    assert not found[PATH]["ok"]
    assert "expected the host to wait 4 times, found 12" in found[PATH]["error"]
    assert "8 times in the backward" in found[PATH]["error"]
    assert [number for site, number in found[PATH]["sites"].items() if site.endswith(" launch")] == [8]


def test_read_of_a_value_is_an_error(tmp_path):
    def launch(stock, message, *tensors):
        tensors[0].sum().item()
        return stock(message, *tensors)

    with around(AllToAll, "launch", launch):
        found = rehearsed(smoke_of(PATH), tmp_path)
    assert found[PATH]["waits"] == 4 + 8
    assert "error" in found[PATH]


def test_path_that_fails_is_an_error_and_the_next_one_runs(tmp_path):
    def end_step(_, trace):
        raise RuntimeError("no trace")

    with around(Trace, "end_step", end_step):
        found = rehearsed(smoke_of("traced", PATH), tmp_path)
    assert found["traced"]["error"] == "RuntimeError: no trace"
    assert found[PATH]["ok"]


def test_what_time_leaves_out_is_said(tmp_path):
    found = rehearsed(smoke_of(PATH, "pairs"), tmp_path, limit_s=0.0)
    assert found == {"left out": {"name": "left out", "why": "the time of this part is over", "names": [PATH, "pairs"]}}


def test_waits_are_counted_as_the_virtual_gpu_sees_them():
    with rehearsal() as place, waits.sync_debug_mode_of(place.gpu), place.watch():
        value = torch.ones(2, device="cuda")
        value.sum().item()  # not counted
        before = len(place.gpu.host_waits)
        with waits.counted_waits() as found:
            value.sum().item()
            torch.cuda.current_stream().synchronize()
            torch.cuda.current_stream().record_event().synchronize()
            torch.cuda.synchronize()
        assert found.number == len(place.gpu.host_waits) - before == 4
        assert found.num_in_backward == 0
        assert {site.partition(":")[0] for site in found.sites} == {"test_smoke.py"}
        value.sum().item()
        assert found.number == 4


TILED = Plan((Segment(1, 1, 1), Segment(2, None, 2, tiles=2)), dw_window=2)


@pytest.mark.parametrize(
    ("plan", "settings", "expected"),
    [
        (fixed_plan(1), {}, 3 * 2),
        (fixed_plan(4), {}, 3 * 2 * 4),
        (fixed_plan(2), {"drops": True}, 3 * 2 * 2 * 2),
        (fixed_plan(2, dispatch=DEDUP), {"drops": True}, 3 * 2 * 2),
        (fixed_plan(1, overlap_range=OverlapRange.EXPERTS), {"drops": True, "pads": True}, 0),
        (fixed_plan(2, overlap_range=OverlapRange.EXPERTS), {"drops": True, "pads": True}, 3 * 2 * 2 * 2),
        (TILED, {}, 3 * (1 + 2 * 2)),
        (paired(fixed_plan(1), fixed_plan(2)), {}, 2 * 2 * 2 + 1 * 2),
    ],
)
def test_expected_waits(plan, settings, expected):
    # The layer in the middle is dense where the plan is not in tiles.
    has_experts = [True, plan is TILED, True] if plan is not TILED else [True, True]
    assert waits.expected_waits(plan, has_experts, 3, **settings) == expected
