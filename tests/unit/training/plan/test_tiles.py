"""``--lancet-tiles``: the plans that it allows, and where tiles are refused."""

import dataclasses
import json

import pytest

from megatron_lancet.config import PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.features.pairing.feature import PairingChoice
from megatron_lancet.features.row_bound.feature import RowBoundFlags
from megatron_lancet.features.tiles.feature import TilesChoice
from megatron_lancet.features.tuning.feature import is_tuned
from megatron_lancet.features.tuning.profile_steps import plans_within
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.planning.plan_file import PlanFile, write_plan_file
from megatron_lancet.schedule.plan import LocalTokens, fixed_plan, paired
from megatron_lancet.training.plan.limits import planning_limits
from megatron_lancet.training.plan.select import choose_plan
from tests.plan_text import read_plan
from tests.unit.training.configs import changed, config_with
from tests.unit.training.validated import parsed


@pytest.fixture
def megatron_args(monkeypatch):
    """Megatron's arguments for a run on 8 ranks with experts on two of them."""
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def make(*changes: object):
        args = parsed(monkeypatch, "--num-layers=8", "--moe-router-topk=2", *changes)
        args.world_size = 8
        return args

    return make


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ({"num_chunks": 1}, fixed_plan(1)),
        ({"num_chunks": 1, "tiles": 0}, fixed_plan(1)),
        ({"num_chunks": 1, "tiles": 2}, fixed_plan(1, tiles=2)),
        ({"num_chunks": 2, "tiles": 1}, fixed_plan(2, tiles=1)),
        ({"tiles": 4}, paired(fixed_plan(1, tiles=4))),
        ({"tiles": 4, "pairing": PairingChoice.OFF}, fixed_plan(2, tiles=4)),
    ],
)
def test_fixed_plans_have_the_tiles_that_are_asked_for(megatron_args, wishes, expected):
    plan, line = choose_plan(megatron_args(), config_with(**wishes))
    assert plan == expected
    assert ("tiles=" in line) == bool(wishes.get("tiles"))


def test_planner_is_limited_to_the_tiles_that_are_asked_for(megatron_args):
    args = megatron_args()

    def limits(**wishes):
        config = config_with(**wishes)
        found = planning_limits(args, config)
        return found.tiles, sum(plan.has_tiles for plan in plans_within(args, config, found))

    assert limits() == ((0,), 0)
    assert limits(tiles=TilesChoice.AUTO) == (None, 1)
    assert limits(tiles=0) == ((0,), 0)
    assert limits(tiles=3) == ((3,), 1)
    assert is_tuned(args, config_with(tiles=3))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            config_with(dispatch=TWO_HOP, ranks_per_node=2),
            "the messages of --lancet-dispatch two-hop have no tiles",
        ),
        (config_with(RowBoundFlags(100)), "--lancet-max-expert-rows sends a chunk in rounds, which have no tiles"),
    ],
)
def test_tiles_are_refused_where_rows_go_otherwise(megatron_args, tmp_path, config, reason):
    args = megatron_args("--expert-model-parallel-size", 4) if config.dispatch else megatron_args()
    with pytest.raises(UsageError, match=f"--lancet-tiles 2 is not possible: {reason}"):
        choose_plan(args, changed(config, tiles=2))
    limits = planning_limits(args, changed(config, tiles=TilesChoice.AUTO))
    assert limits.tiles == (0,)
    (excluded,) = (one for one in limits.excluded if one.what == "tiles")
    assert excluded.reason.startswith(reason)
    if not config.dispatch:
        write_plan_file(tmp_path / "plan.json", PlanFile(fixed_plan(1, tiles=2)))
        with pytest.raises(UsageError, match=f"sends rows in tiles, which is not possible here: {reason}"):
            choose_plan(args, dataclasses.replace(config, plan=tmp_path / "plan.json"))


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"plan": PlanChoice.OFF, "tiles": 2}, "--lancet-tiles 2 needs the overlapping block"),
    ],
)
def test_contradictions_are_refused(megatron_args, wishes, message):
    with pytest.raises(UsageError, match=message):
        choose_plan(megatron_args(), config_with(**wishes))


def test_tiles_in_fp8_are_refused(megatron_args):
    args = megatron_args("--transformer-impl", "transformer_engine", "--fp8-format", "e4m3")
    with pytest.raises(UsageError, match=r"fp8 and fp4 give each tile scales of its own.* or drop --fp8-format"):
        choose_plan(args, config_with(tiles=2))
    assert planning_limits(args, config_with()).tiles == (0,)


def test_micro_batches_with_tiles_may_be_paired(megatron_args, tmp_path):
    args, tiled = megatron_args(), fixed_plan(1, tiles=2)
    config = config_with(num_chunks=1, tiles=2, pairing=PairingChoice.ON)
    assert choose_plan(args, config)[0] == paired(tiled)
    write_plan_file(tmp_path / "plan.json", PlanFile(paired(tiled)))
    assert choose_plan(args, config_with(plan=tmp_path / "plan.json"))[0] == paired(tiled)


def test_one_expert_parallel_rank_has_no_tiles(megatron_args):
    args = megatron_args("--expert-model-parallel-size", 1)
    with pytest.raises(UsageError, match="--lancet-tiles 2 overlaps the all-to-all of expert parallelism, but there"):
        choose_plan(args, config_with(tiles=2))


def test_plan_files_keep_tiles():
    plan = fixed_plan(1, tiles=2, local_tokens=LocalTokens.AFTER)
    assert json.loads(plan.to_json())["segments"][0]["tiles"] == 2
    assert "tiles" not in json.loads(fixed_plan(1).to_json())["segments"][0]
    assert read_plan(plan.to_json()) == plan
