"""The benchmark of injected causes: its command line, and the way from steps to what was named and recovered."""

import dataclasses

import pytest

from benchmarks.causes.__main__ import make_job, parse_arguments
from benchmarks.causes.cases import CASES, SIZES
from benchmarks.causes.summary import as_markdown, as_text, summarise
from benchmarks.harness.job import read_job
from megatron_lancet.errors import UsageError
from megatron_lancet.lab.causes.replay import Cause

FIELDS = ("exposed_forward_ms", "exposed_backward_ms", "counts_ms")


def step(exposed_ms: float, **parts_ms: float):
    parts = {
        str(cause): {"ms": parts_ms.get(cause, 0.0), "alone_ms": parts_ms.get(cause, 0.0) + 1.0} for cause in Cause
    }
    return {
        "samples": [[exposed_ms, 0.0, 0.0], [exposed_ms, 0.0, 0.0]],
        "causes": {"parts": parts, "unexplained_ms": 1.0},
    }


def case_of(name: str, without, beside, is_disturbed=False):
    run = {"size": 2.0, "plan": "k1", "disturbance": {"is_disturbed": is_disturbed}}
    run["steps"] = {"without": without, "with": beside}
    return {**dataclasses.asdict(CASES[name]), "rate_bps": 3e8, "sample_fields": list(FIELDS), "runs": [run]}


def test_largest_rise_is_named_and_compared_with_the_injected():
    without = [step(50.0, wire=50.0), step(52.0, wire=52.0), step(51.0, wire=50.0, rows=1.0)]
    beside = [step(80.0, wire=50.0, rows=30.0), step(82.0, wire=51.0, rows=31.0), step(81.0, wire=52.0, rows=29.0)]
    (run,) = summarise(case_of("rows", without, beside)).runs
    assert (run.injected_ms, run.found_ms["rows"], run.off_ms) == (30.0, 30.0, 0.0)
    assert run.named_first == "rows"
    assert run.is_recovered
    assert "named first in 1 of 1 runs" in as_text([summarise(case_of("rows", without, beside))])
    assert "| rows | 2 | k1 | 51.0 | 81.0 | 30.0 | 30.0 | +0.0 | 30.0 | rows | 1.0 |" in as_markdown(
        [summarise(case_of("rows", without, beside))]
    )


def test_a_wrong_name_a_wrong_size_and_a_disturbance_show():
    without, beside = [step(50.0, wire=50.0)] * 3, [step(80.0, wire=52.0, rows=20.0, pace=58.0)] * 3
    text = as_text([summarise(case_of("rows", without, beside, is_disturbed=True))])
    assert "rows (DISTURBED)" in text
    assert "-10.0 !" in text  # 8 ms are allowed
    assert "pace !" in text
    assert "named first in 0 of 1 runs, its size recovered within 10% of the exposed time or 5 ms in 0" in text


def test_each_cause_has_five_sizes():
    assert {cause: len(set(sizes)) >= 4 and len(sizes) == 5 for cause, sizes in SIZES.items()} == dict.fromkeys(
        SIZES, True
    )
    assert set(CASES) == {"rows", "pace", "wire", "host"}


def test_command_line(tmp_path):
    args = parse_arguments(["--cases", "wire", "--sweeps", "2", "--rate", "300"])
    job = make_job(args, [0, 1], tmp_path / "result.json")
    job.write(tmp_path / "job.json")
    assert read_job(tmp_path / "job.json") == job
    assert ([case.name for case in job.cases], job.sweeps, job.rate_bps) == (["wire"], 2, 3e8)
    with pytest.raises(UsageError, match="there is no case link"):
        make_job(parse_arguments(["--cases", "link"]), [0, 1], tmp_path / "result.json")
