"""The planner of an installation without the folders of dispatches and tiles, and without their registry lines."""

import subprocess
import sys

SCRIPT = """
import sys

class NoFeatures:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("megatron_lancet.features."):
            raise ImportError(name)

sys.meta_path.insert(0, NoFeatures())
from tests.plan_text import read_plan
from megatron_lancet import registry
registry._DISPATCHES, registry._TILED = registry._DISPATCHES[:1], ()

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.planning.explain import explain
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.schedule.plan import Plan, fixed_plan

profile = synthetic_profile(Machine(topk=2))
planned = make_plan(profile, Limits(tiles=(0, 2)))
print(planned.plan)
print(explain(profile, planned.plan, planned).other_dispatches_ms)
print(next(one.reason for one in planned.excluded if one.what == "tiles"))
for text in (fixed_plan(1).to_json()[:-1] + ', "dispatch": "dedup"}', '{"version": 3, "segments": [{"first_layer": 1, '
        '"last_layer": null, "num_chunks": 1, "tiles": 2}], "dw_policy": "none"}'):
    try:
        read_plan(text)
    except ValueError as error:
        print(error)
"""


def test_core_plans_with_the_plain_dispatch_alone():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    plan, others, no_tiles, no_dedup, no_tiled_plan = ran.stdout.splitlines()
    assert plan.startswith("chunks=")
    assert "dispatch=" not in plan
    assert others == "{}"
    assert no_tiles == "this installation of Megatron-Lancet lacks features/tiles"
    assert no_dedup.startswith("plan.dispatch: expected one of plain, found 'dedup', and this installation")
    assert no_dedup.endswith("Install the whole package, or make a plan with one of these")
    assert no_tiled_plan.startswith("plan: tiles are not possible: this installation of Megatron-Lancet lacks ")
    assert no_tiled_plan.endswith("Install the whole package, or plan without tiles")
