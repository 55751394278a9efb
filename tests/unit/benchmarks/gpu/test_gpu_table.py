"""Paired ratios, the table, and the comparison of gradients."""

import pytest
import torch

from benchmarks.gpu.measure import WrongGradientsError, check_errors, whole_error
from benchmarks.gpu.sizes import SIZES
from benchmarks.gpu.table import Samples, found_in, summarise, table
from benchmarks.gpu.variants import Work, why_megatron_refuses
from benchmarks.gradient_error import relative_errors


def test_ratios_are_paired_by_round():
    samples = {
        "stock": Samples(step_ms={0: 10, 1: 20, 2: 40}, exposed_ms=[4, 5, 6]),
        "ours": Samples(step_ms={0: 5, 1: 8, 2: 20}, exposed_ms=[1, 1, 2], wire_ms=[3.0], peak_mb=[7.0]),
    }
    rows = summarise(samples, "stock")
    assert (rows["ours"].speedup, rows["ours"].speedup_low, rows["ours"].speedup_high) == (2.0, 2.0, 2.25)
    assert rows["ours"].step_ms == 8
    assert rows["ours"].exposed_cut == pytest.approx(0.8)
    assert (rows["ours"].wire_ms, rows["ours"].peak_mb) == (3.0, 7.0)
    assert (rows["stock"].speedup, rows["stock"].exposed_cut, rows["stock"].wire_ms) == (1.0, 0.0, None)


def test_only_rounds_in_which_both_ran_are_compared():
    samples = {"stock": Samples({0: 10, 1: 20, 2: 40}), "ours": Samples({1: 10, 2: 10}), "late": Samples({2: 1})}
    rows = summarise(samples, "stock")
    assert rows["ours"].speedup == 3.0
    assert rows["ours"].exposed_ms is None
    assert "late" not in rows  # one round has no quartiles


def test_records_are_sorted_and_failed_ones_left_out():
    step = {"name": "step", "link": "slow"}
    records = [
        {"name": "variant", "variant": "refused", "skipped": "needs x"},
        {"name": "gradients", "variant": "stock", "relative_error": 0.0},
        {"name": "gradients", "variant": "ours", "relative_error": 1e-3},
        {**step, "variant": "ours", "round": 0, "step_ms": 2.0},
        {**step, "variant": "stock", "round": 0, "step_ms": 4.0, "peak_mb": 7.0},
        {**step, "variant": "failing", "round": 0, "step_ms": 1.0},
        {"name": "step", "variant": "failing", "error": "OutOfMemoryError: none left"},
        {"name": "trace", "link": "slow", "variant": "ours", "wire_ms": 3.0, "exposed_ms": 1.0, "idle_ms": 0.5},
        {"name": "stopped", "rounds": 1, "wanted": 2},
    ]
    found = found_in(records)
    assert found.skipped == {"refused": "needs x", "failing": "OutOfMemoryError: none left"}
    assert [*found.samples["slow"]] == ["stock", "ours"]
    assert found.samples == {
        "slow": {
            "stock": Samples(step_ms={0: 4.0}, peak_mb=[7.0]),
            "ours": Samples({0: 2.0}, exposed_ms=[1.0], wire_ms=[3.0], idle_ms=[0.5], gradient_error=1e-3),
        }
    }


def test_nothing_exposed_is_nothing_cut():
    assert summarise({"stock": Samples({0: 1, 1: 1}, [0.0, 0.0])}, "stock")["stock"].exposed_cut is None


def test_table_lists_what_ran_and_what_did_not():
    rows = summarise({"stock": Samples({0: 10, 1: 10}, [4, 4]), "ours": Samples({0: 8, 1: 8}, [1, 1])}, "stock")
    head, stock, ours, skipped = table(rows, {"another": "AssertionError: needs x"}).splitlines()
    assert "speed-up" in head
    assert "1.000 (1.000-1.000)" in stock
    assert "1.250" in ours
    assert "75%" in ours
    assert skipped == "another  skipped: AssertionError: needs x"
    assert len({len(line) for line in (head, stock, ours)}) == 1


def test_errors_are_relative_to_the_norm():
    truth = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}
    found = {"a": torch.tensor([3.0, 4.5]), "b": torch.zeros(2)}
    assert relative_errors(found, truth) == pytest.approx({"a": 0.1, "b": 0.0})
    assert whole_error(found, truth) == pytest.approx(0.1)


def test_errors_of_bf16_pass_and_a_lost_chunk_does_not():
    torch.manual_seed(1)
    chunks = torch.randn(4, 50, 40)
    truth = {"w": chunks.sum(dim=0)}
    stock = relative_errors({"w": truth["w"].bfloat16().float()}, truth)
    chunked = relative_errors({"w": chunks.bfloat16().sum(dim=0).float()}, truth)
    assert 0 < stock["w"] < chunked["w"] < 0.01
    check_errors("ours", chunked, stock)
    for wrong in (chunks[:3].sum(dim=0), torch.full((50, 40), float("nan"))):
        with pytest.raises(WrongGradientsError, match="ours: the gradient of w is"):
            check_errors("ours", relative_errors({"w": wrong}, truth), stock)


def test_megatrons_overlap_is_skipped_only_where_it_is_refused():
    def work(**changes) -> Work:
        return Work(SIZES["tiny"], **{"num_ranks": 2, "num_micro_batches": 2, "device": torch.device("cpu"), **changes})

    assert why_megatron_refuses(work()) is None
    assert "only supported with bf16 or fp16" in why_megatron_refuses(work(bf16=False))
    assert "only supported with expert model parallelism" in why_megatron_refuses(work(num_ranks=1))
    with pytest.raises(TypeError):
        why_megatron_refuses(work(num_ranks="two"))
