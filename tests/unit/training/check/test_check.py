"""Findings of a check, from made-up outcomes of its runs."""

from pathlib import Path

import pytest
import torch

from benchmarks.checks.__main__ import summary
from benchmarks.checks.bugs import BUGS
from megatron_lancet.lab.check.check import Checker, Finding, Verdict, check
from megatron_lancet.lab.check.compare import Outcome
from megatron_lancet.lab.check.layout import Layout
from megatron_lancet.lab.check.ranks import RefusedRunError
from megatron_lancet.lab.check.report import record, report
from megatron_lancet.lab.check.run import EXIT_CODES
from megatron_lancet.lab.check.shrink import Shrunk

SHRUNK = Shrunk([], ["--lancet-num-chunks", "2"], Layout(tensor=2), [])
STOCK_ON_RANKS, OVERLAP = "stock on ranks", "overlap"


@pytest.fixture
def found(monkeypatch, tmp_path):
    """Checks in which the runs in ``wrong``, as (kind, seed), have a wrong gradient."""

    def make(wrong: set[tuple[str, int]], ours: str = "runs", **settings: object) -> Finding:
        def run(self: Checker, words: list[str], layout: Layout, flags: list[str], seed: int) -> Outcome:
            is_ours = flags == SHRUNK.ours
            if is_ours and ours == "refused":
                raise RefusedRunError("no chunks")
            kind = OVERLAP if is_ours else STOCK_ON_RANKS if layout.num_ranks > 1 else "stock on one rank"
            # A stock fault also affects the overlap's runs.
            is_wrong = (kind, seed) in wrong or (is_ours and (STOCK_ON_RANKS, seed) in wrong)
            value = torch.tensor([1.5 if is_wrong else 1.0])
            return Outcome({"lm loss": 1.0}, 1.0, {"weight": value}, {}, overlaps=is_ours and ours == "runs")

        monkeypatch.setattr(Checker, "run", run)
        return check(SHRUNK, Path(tmp_path), timeout_s=1.0, **settings)

    return make


def last_line(finding: Finding) -> str:
    return report(finding, 1.0).splitlines()[-1]


def test_difference_of_the_overlap_that_one_seed_shows_is_one(found):
    finding = found({(OVERLAP, 1)})
    assert finding.verdict == Verdict.DIFFERS
    assert finding.our_seeds == (1,)
    assert finding.stock_seeds == ()
    assert finding.ours is not None
    assert finding.ours.wrong == ["weight"]
    text = report(finding, 1.0)
    assert "with seed 1 of the samples, not with 2:\n  a fault" in text
    assert last_line(finding).startswith("differs: ")
    assert record(finding, 1.0)["our_seeds"] == (1,)
    assert EXIT_CODES[finding.verdict] == 1


def test_difference_of_stock_that_one_seed_shows_is_one(found):
    finding = found({(STOCK_ON_RANKS, 1)})
    assert (finding.verdict, finding.stock_seeds, finding.our_seeds) == (Verdict.DIFFERS, (1,), ())
    assert finding.culprit is not None
    assert finding.culprit.axes == ["TP"]
    assert "with seed 1 of the samples, not with 2:\n  a fault" in report(finding, 1.0)


def test_difference_that_both_seeds_show_names_them(found):
    finding = found({(OVERLAP, 1), (OVERLAP, 2)})
    assert finding.our_seeds == (1, 2)
    assert "with each seed of the samples (1, 2)" in report(finding, 1.0)


@pytest.mark.parametrize(
    ("ours", "why"), [("refused", "not compared: refused: no chunks"), ("stock modules", "not compared: stock modules")]
)
def test_overlap_that_was_not_compared_has_a_status_of_its_own(found, ours, why):
    finding = found(set(), ours)
    assert finding.verdict == Verdict.NOT_COMPARED
    assert why in report(finding, 1.0)
    assert last_line(finding).startswith("not compared: stock is equal, but the overlap did not run: ")
    assert record(finding, 1.0)["verdict"] == "not compared"
    assert EXIT_CODES[finding.verdict] == 3
    assert found({(STOCK_ON_RANKS, 1), (STOCK_ON_RANKS, 2)}, ours).verdict == Verdict.DIFFERS


def test_overlap_is_compared_with_padding_too(found):
    assert found({(OVERLAP, 1)}, padding=True).verdict == Verdict.DIFFERS


def test_overlap_that_was_left_out_on_demand_is_no_fault(found):
    finding = found({(OVERLAP, 1)}, with_ours=False)
    assert finding.verdict == Verdict.EQUAL
    assert last_line(finding).startswith("equal (stock only): ")


def test_summary_counts_faults_and_uncompared_launches():
    bugs = [{"name": bug.name, "found": True} for bug in BUGS]
    drawn = [{"state": Verdict.EQUAL}, {"state": Verdict.EQUAL}, {"state": Verdict.NOT_COMPARED}]
    expected = "10 of 10 cases of bugs found, 9 distinct faults; of 3 random launches: 2 equal, 1 not compared"
    assert summary(bugs, drawn) == expected
    bugs[[bug.name for bug in BUGS].index("#6470")]["found"] = False
    assert summary(bugs, drawn).startswith("9 of 10 cases of bugs found, 9 distinct faults;")
