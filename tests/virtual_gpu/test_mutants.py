"""Every place that orders kernels or keeps memory is needed: without it a case fails, the one that the report names."""

import json
from pathlib import Path

import pytest

from tests.ranks import launch
from tests.virtual_gpu import mutants
from tests.virtual_gpu.needless import NEEDLESS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

TIMEOUT_S = 900
FOUND = {str(mutant): mutant for mutant in mutants.find()}
REPORTED = mutants.reported_cases()
REPEAT = "Run: python -m tests.virtual_gpu.mutants --write"


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutants")
    worker = Path(__file__).with_name("worker.py")
    return launch.results_of(worker, 1, folder, TIMEOUT_S, ["--mutants"])[0]


def test_mutants_of_the_product_are_those_of_the_report():
    assert sorted(FOUND) == sorted(REPORTED), REPEAT


def test_mutants_without_a_case_are_listed_with_a_reason():
    assert {name for name, case in REPORTED.items() if not case} == {
        name for name, mutant in FOUND.items() if mutants.is_needless(mutant)
    }, REPEAT


def test_reasons_name_places_of_the_product():
    places = {(mutant.file, mutant.function, mutant.line) for mutant in FOUND.values()}
    assert set(NEEDLESS) <= places


@pytest.mark.parametrize("name", [name for name, case in REPORTED.items() if case])
def test_mutant_is_caught_by_the_case_of_the_report(judged, name):
    assert judged["caught"].get(name), REPEAT


def test_cases_of_mutants_are_clean_without_them(judged):
    assert judged["clean"] == dict.fromkeys(judged["clean"], "")


def test_report_as_text_is_that_of_the_figures():
    report = json.loads(mutants.REPORT.read_text())
    assert mutants.REPORT.with_suffix(".md").read_text() == mutants.as_text(report)
