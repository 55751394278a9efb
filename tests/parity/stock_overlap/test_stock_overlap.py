"""Stock modules with Megatron's own overlap train like Megatron's own script, or fail with a one-line error."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parity.stock_overlap.rows import FOLDER, REFUSED, ROWS, Refused, Row
from tests.ranks import launch
from tests.ranks.pretraining import SHORT_RUN, TINY_MODEL

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("overlap_worker.py")
# Megatron's own pairing needs Transformer Engine layers in bf16; a step has four micro-batches.
SETTINGS = (
    "--transformer-impl transformer_engine --moe-grouped-gemm --disable-bias-linear --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --bf16 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 "
    "--global-batch-size 16 --train-iters 2"
).split()
OURS = ["--lancet-cache", "off"]
MEGATRONS = [*TINY_MODEL, *SHORT_RUN[: SHORT_RUN.index(OURS[0])], *SETTINGS]


def runs_of(name: str, row: Row | Refused, data: Path) -> dict[str, tuple[str, list[str], bool]]:
    """Returns a row's run and its reference, in the worker's format."""
    command = [*map(str, MEGATRONS), "--data-path", str(data), *row.flags.replace(FOLDER, str(data.parent)).split()]
    ours = [*OURS, *(["--lancet-plan", "off"] if row.is_off else [])]
    if isinstance(row, Refused):
        return {f"refused: {name}": ("ours", [*command, *ours], False)}
    if row.without is None:
        reference = ("stock", command, row.only_warms_up)
    else:
        reference = ("ours", [*(word for word in command if word not in row.without.split()), *ours], False)
    return {name: ("ours", [*command, *ours], row.only_warms_up), f"reference: {name}": reference}


@pytest.fixture(scope="module")
def results(token_data, tmp_path_factory) -> dict[str, Any]:
    """Each run's results on the last rank, which has the losses even with pipeline stages."""
    found: dict[str, Any] = {}
    for num_ranks in (2, 4):
        folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        rows = [(name, row) for table in (ROWS, REFUSED) for name, row in table.items() if row.num_ranks == num_ranks]
        runs = {key: run for name, row in rows for key, run in runs_of(name, row, token_data).items()}
        (folder / "runs.json").write_text(json.dumps(runs))
        found |= launch.results_of(WORKER, num_ranks, folder, 400, [folder / "runs.json"], te=True)[-1]
    return found


@pytest.mark.parametrize("name", ROWS)
def test_stock_modules_with_megatrons_own_overlap_train_as_their_reference(results, name):
    ours, reference = results[name], results[f"reference: {name}"]
    assert len(ours["losses"]) == 2
    assert {"lm loss", "grad norm"} <= ours["losses"][0].keys()
    assert ours["losses"] == reference["losses"]
    assert "megatron_lancet" not in ours["packages"]
    assert ours["num_schedules"] == ROWS[name].num_schedules


def test_losses_of_rows_differ_where_their_data_or_models_do(results):
    """Negative control: these rows differ from each other, so the comparison detects a different model."""
    names = ["pairs", "pairs, early release", "pairs of documents", "pairs of bins", "reason: experts", "userbuffers"]
    assert len({json.dumps(results[name]["losses"]) for name in names}) == len(names)


@pytest.mark.parametrize("name", REFUSED)
def test_stock_modules_that_cannot_run_are_refused_in_one_line(results, name):
    refusal = results[f"refused: {name}"]["refused"]
    assert REFUSED[name].message in refusal
    assert "\n" not in refusal
