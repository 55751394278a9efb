"""Every place that orders kernels or keeps memory is needed: without it, the report's case fails as reported."""

from collections import Counter

import pytest

from tests.ranks import launch
from tests.virtual_gpu import mutants, worker
from tests.virtual_gpu.places.misplaced import REPLACED
from tests.virtual_gpu.places.needless import NEEDLESS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

FOUND = {str(mutant): mutant for mutant in mutants.find()}
REPORTED = mutants.reported()
CAUGHT = [name for name, row in REPORTED.items() if row["case"]]
UNDEFINED = (
    "runtime/transport/nccl.py _StreamCounts.__init__: dist.all_to_all_single(self._received, sent, group=group) "
    "[behind on_host[1].copy_(self._received, non_blocking=True)]"
)
"""Copies counts that have not arrived: the error that follows depends on the memory."""
REPEAT = "Run: python -m tests.virtual_gpu.mutants --write"


judged = launch.result(worker.judged, timeout_s=900, joins=False)
wrong_when_late = launch.result(worker.wrong_when_late, timeout_s=900, joins=False)


def test_mutants_of_the_product_are_those_of_the_report():
    assert sorted(FOUND) == sorted(REPORTED), REPEAT


def test_mutants_without_a_case_are_listed_with_a_reason():
    assert REPORTED.keys() - CAUGHT == {name for name, mutant in FOUND.items() if mutants.is_needless(mutant)}, REPEAT


def test_reasons_name_places_of_the_product():
    places = {place for mutant in FOUND.values() for place in (mutant.place, (*mutant.place, mutant.change))}
    assert set(NEEDLESS) <= places


def test_misplaced_statements_are_in_the_product():
    found = Counter((mutant.file, mutant.function, mutant.change) for mutant in FOUND.values())
    listed = [(place.file, place.function, change[0]) for place, change in REPLACED.items()]
    assert {place: found[place] for place in listed} == dict.fromkeys(listed, 1)


@pytest.mark.parametrize("name", CAUGHT)
def test_mutant_is_caught_for_the_reason_of_the_report(judged, name):
    found = mutants.reason(judged["caught"][name])
    if name == UNDEFINED:
        assert "Error: " in found
    else:
        assert found == mutants.reason(REPORTED[name]["how"]), REPEAT


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in CAUGHT if REPORTED[name]["wrong_when_late"]])
def test_mutant_makes_numbers_wrong_if_a_stream_is_late(wrong_when_late, name):
    assert wrong_when_late[name], REPEAT


def test_reasons_tell_problems_apart_and_not_where_the_code_is():
    race = (
        "race: read by add on comm of group {} ({}:3:launch < comm.py:4:<lambda>) is not ordered after {} on compute "
        "(b.py:1:f)"
    )
    expected = "race: read by add on comm is not ordered after mul on compute"
    assert mutants.reason(race.format(9, "a.py", "mul")) == expected == mutants.reason(race.format(10, "c.py", "mul"))
    others = [race.format(9, "a.py", "sum"), race.format(9, "a.py", "mul").replace("on compute", "on counts")]
    others += ["freed in use: memory of comm (a.py:3:launch)", "wrong numbers", "TypeError: mul", "RuntimeError: mul"]
    assert expected not in map(mutants.reason, others)
    assert len(set(map(mutants.reason, others))) == len(others)


def test_cases_of_mutants_are_clean_without_them(judged):
    assert judged["clean"] == dict.fromkeys(judged["clean"], "")
