"""Megatron's own entry with ``--spec``: it trains by a plan, and like stock."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_lancet.config import OWN_SPEC
from tests.ranks import launch
from tests.ranks.pretraining import EP2, SHORT_RUN, TINY_MODEL, pretrain

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("spec_worker.py")
MEGATRONS = [*TINY_MODEL, *SHORT_RUN[: SHORT_RUN.index("--lancet-cache")], *EP2, "--train-iters", 5]
OVERLAPPED_REDUCTIONS = ["--overlap-grad-reduce", "--ddp-bucket-size", 20000]


def pretrain_gpt(data: Path, folder: Path, extra: Sequence[object], lancet_flags: str = "") -> list[launch.RankResult]:
    env = {"LANCET_TEST_RESULT": str(folder / "result.json"), "LANCET_FLAGS": lancet_flags}
    return launch.run(WORKER, [*MEGATRONS, "--data-path", data, *extra], 2, folder, env=env)


def result_in(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def stock(token_data, tmp_path_factory):
    """What Megatron's own entry did, without anything of ours."""
    folder = tmp_path_factory.mktemp("stock")
    launch.check(pretrain_gpt(token_data, folder, OVERLAPPED_REDUCTIONS))
    return result_in(folder)


def test_losses_with_plan_off_equal_megatrons_own_entry_bitwise(stock, token_data, tmp_path):
    off = pretrain(token_data, [*EP2, *OVERLAPPED_REDUCTIONS, "--lancet-plan", "off"], tmp_path, train_iters=5)
    assert len(off.losses) == 5
    assert {"lm loss", "grad norm"} <= off.losses[0].keys()
    assert off.losses == stock["losses"]


def test_losses_with_spec_equal_stock_and_report_is_written(stock, token_data, tmp_path):
    ours = tmp_path / "ours"
    flags = f"--lancet-num-chunks 2 --lancet-cache off --lancet-report '{ours / 'the report'}'"
    overlapped = pretrain_gpt(token_data, ours, [*OVERLAPPED_REDUCTIONS, "--spec", *OWN_SPEC], flags)
    launch.check(overlapped)
    output = overlapped[0].output
    assert "(chunks=2 dim=batch range=stack dw=fill dw-window=4) (--spec)" in output
    assert "Megatron-Lancet report" in output
    report = json.loads((ours / "the report" / "report.json").read_text())
    assert sum(report[f"num_dw_{when}"] for when in ("in_gaps", "early", "late")) > 0
    assert not any("megatron_lancet" in module for module in stock["model_modules"])
    assert "megatron_lancet.model.transformer_block" in result_in(ours)["model_modules"]
    assert len(result_in(ours)["losses"]) == 5
    for mine, its in zip(result_in(ours)["losses"], stock["losses"], strict=True):
        assert mine == pytest.approx(its, rel=1e-5)


def test_faulty_lancet_flag_ends_with_one_line(token_data, tmp_path):
    results = pretrain_gpt(token_data, tmp_path, ["--spec", *OWN_SPEC], "--lancet-num-chunk 2")
    assert [result.returncode for result in results] == [2, 2]
    assert "error: LANCET_FLAGS: unrecognized arguments: --lancet-num-chunk 2" in results[0].output
    assert "did you mean --lancet-num-chunks" in results[0].output
    assert "Traceback" not in results[0].output
