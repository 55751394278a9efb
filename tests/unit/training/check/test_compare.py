import json
import math

import pytest
import torch

from megatron_lancet.lab.check.check import Culprit, Finding
from megatron_lancet.lab.check.compare import Comparison, Outcome, compare, outcome_of
from megatron_lancet.lab.check.layout import Layout
from megatron_lancet.lab.check.report import record, report
from megatron_lancet.lab.check.shrink import Shrunk


def outcome(gradients: dict[str, list[float]], loss: float = 2.0, norm: float = 1.0, **apart: float) -> Outcome:
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in gradients.items()}
    return Outcome({"lm loss": loss}, norm, tensors, apart, False)


def test_each_part_of_a_run_is_compared():
    expected = outcome({"a": [3.0, 4.0], "b": [1.0]})
    assert compare(expected, expected).wrong == []
    assert compare(outcome({"a": [3.0, 4.0], "b": [1.1]}), expected).wrong == ["b"]
    assert compare(outcome({"a": [3.0, 4.0], "b": [1.0]}, loss=2.001), expected).wrong == ["loss"]
    assert compare(outcome({"a": [3.0, 4.0], "b": [1.0]}, norm=1.001), expected).wrong == ["grad norm"]
    assert compare(outcome({"a": [3.0, 4.0], "b": [1.0]}, a=0.1), expected).wrong == ["a (ranks disagree)"]
    assert compare(outcome({"a": [3.0, 4.0]}), expected).parameters["b"] == math.inf
    assert compare(outcome({"a": [3.0, math.nan], "b": [1.0]}), expected).wrong == ["a"]
    assert compare(outcome({"a": [3.0, 4.0], "b": [1.0]}, loss=math.nan), expected).wrong == ["loss"]


def test_rounding_of_a_gradient_that_is_zero_is_no_difference():
    expected = outcome({"a": [3.0, 4.0], "zero": [0.0]})
    assert compare(outcome({"a": [3.0, 4.0], "zero": [1e-8]}), expected).wrong == []
    assert compare(outcome({"a": [3.0, 4.0], "zero": [1e-5]}), expected).wrong == ["zero"]


@pytest.fixture
def folder(tmp_path):
    """Two ranks: one half each of ``cut``, both the whole of ``same``, a layer each of ``stacked``."""

    def write(same_on_rank_1: float = 1.0) -> object:
        for rank in range(2):
            shards = [
                ("cut", (4,), [(2 * rank, 2 * rank + 2)], torch.full((2,), float(rank))),
                ("same", (1,), [(0, 1)], torch.tensor([1.0 if rank == 0 else same_on_rank_1])),
                ("stacked", (2, 3), [(rank, rank + 1), (0, 3)], torch.full((3,), rank + 5.0)),
            ]
            torch.save(shards, tmp_path / f"shards.{rank}")
            losses = {"lm loss": 2.5} if rank == 1 else {}
            result = {"losses": losses, "grad_norm": 3.0, "overlaps": False}
            (tmp_path / f"result.{rank}.json").write_text(json.dumps(result))
        return tmp_path

    return write


def test_parts_of_ranks_are_put_together(folder):
    found = outcome_of(folder(), 2)
    assert found.losses == {"lm loss": 2.5}
    assert found.gradients["cut"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert found.gradients["stacked[1]"].tolist() == [6.0, 6.0, 6.0]
    assert set(found.gradients) == {"cut", "same", "stacked[0]", "stacked[1]"}
    assert found.disagreement == {"same": 0.0}


def test_ranks_that_hold_the_same_must_agree(folder):
    assert outcome_of(folder(same_on_rank_1=1.5), 2).disagreement["same"] == pytest.approx(0.5 / 1.5)


def finding(stock: Comparison, ours: Comparison | None, culprit: Culprit | None) -> Finding:
    return Finding(Shrunk([], [], Layout(tensor=2), ["no biases"]), stock, ours, "refused", culprit, (), (), 3)


def test_report_names_what_differs_and_its_axis():
    wrong = Comparison(0.0, 2e-3, {"router": 0.5, **{f"layer {i}": 0.1 for i in range(9)}, "fine": 1e-7})
    text = report(finding(wrong, None, Culprit(["TP"], ["EP"], ["SP"])), 12.0)
    for line in ("DIFFERS  router", "DIFFERS  grad norm", "and 2 more parameters", "1 of 11 gradients equal"):
        assert line in text
    assert "cause: the difference disappears without TP" in text
    assert "not compared: refused" in text
    assert text.splitlines()[-1] == "differs: 3 runs in 12 s"
    assert "changed: no biases" in text


def test_report_of_an_equal_launch():
    equal = Comparison(0.0, 0.0, {"fine": 1e-7})
    found = finding(equal, equal, None)
    assert report(found, 5.0).splitlines()[-1] == "equal: 3 runs in 5 s"
    written = json.loads(json.dumps(record(found, 5.0)))
    assert written["differs"] is False
    assert written["stock"]["parameters"] == {"fine": 1e-7}
    assert written["causes"] is None
