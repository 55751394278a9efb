"""Checkpoints are stock's: each side loads the other's, and a killed run goes on where its last checkpoint was."""

import pytest

from tests.ranks import launch
from tests.ranks.pretraining import EP2, WORKER, Run, command_line, pretrain

pytestmark = pytest.mark.distributed

NUM_ITERS, SAVED_AT = 6, 3
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
STOCK = ["--lancet-plan", "off"]
OURS = ["--lancet-num-chunks", "2"]
# As in test_losses_equal_stock.py: the order of sums.
TOLERANCE = 1e-5
SAVE = ["--save-interval", SAVED_AT]
SIDES = {
    "stock": STOCK,
    "ours": OURS,
    "ours-distributed": [*OURS, *DISTRIBUTED],
    "ours-distributed-bf16": [*OURS, *DISTRIBUTED, "--bf16"],
    "stock-bf16": [*STOCK, "--bf16"],
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, token_data):
    """Runs of NUM_ITERS steps that save at SAVED_AT, by side; with the folder of their checkpoints."""
    runs: dict[str, tuple[Run, object]] = {}

    def run(side: str):
        if side not in runs:
            folder = tmp_path_factory.mktemp(f"undisturbed-{side}")
            flags = SIDES[side]
            extra = [*EP2, *flags, *SAVE, "--save", folder / "checkpoints"]
            runs[side] = pretrain(token_data, extra, folder, train_iters=NUM_ITERS), folder / "checkpoints"
        return runs[side]

    return run


def resumed(token_data, checkpoints, flags, folder) -> Run:
    extra = [*EP2, *flags, "--load", checkpoints, "--ckpt-step", SAVED_AT]
    run = pretrain(token_data, extra, folder, train_iters=NUM_ITERS)
    assert len(run.losses) == NUM_ITERS - SAVED_AT
    return run


@pytest.mark.parametrize("name", ["lm loss", "grad norm"])
def test_overlapping_run_resumes_from_checkpoint_of_stock(undisturbed, token_data, tmp_path_factory, name, request):
    expected, checkpoints = undisturbed("stock")
    run = _once(
        request, "ours-from-stock", lambda folder: resumed(token_data, checkpoints, OURS, folder), tmp_path_factory
    )
    assert run.series(name) == pytest.approx(expected.series(name)[SAVED_AT:], rel=TOLERANCE)


@pytest.mark.parametrize("name", ["lm loss", "grad norm"])
def test_stock_run_resumes_from_checkpoint_of_overlapping_run(undisturbed, token_data, tmp_path_factory, name, request):
    expected, checkpoints = undisturbed("ours")
    run = _once(
        request, "stock-from-ours", lambda folder: resumed(token_data, checkpoints, STOCK, folder), tmp_path_factory
    )
    assert run.series(name) == pytest.approx(expected.series(name)[SAVED_AT:], rel=TOLERANCE)


@pytest.mark.parametrize("side", ["ours-distributed", "ours-distributed-bf16", "stock-bf16"])
def test_resumed_run_equals_uninterrupted_run_bitwise(undisturbed, token_data, tmp_path, side):
    """Also the proof of the optimizer's state: stock can't resume the distributed one without TE or apex."""
    expected, checkpoints = undisturbed(side)
    run = resumed(token_data, checkpoints, SIDES[side], tmp_path)
    for name in ("lm loss", "grad norm"):
        assert run.series(name) == expected.series(name)[SAVED_AT:]


def test_run_with_a_killed_rank_resumes_from_its_last_checkpoint(undisturbed, token_data, tmp_path):
    expected, _ = undisturbed("ours")
    checkpoints = tmp_path / "checkpoints"
    extra = [*EP2, *OURS, *SAVE, "--train-iters", NUM_ITERS, "--save", checkpoints, "--load", checkpoints]
    kill = {"LANCET_TEST_KILL_RANK": "1", "LANCET_TEST_KILL_AFTER_STEP": str(SAVED_AT + 2)}
    results = launch.run(WORKER, command_line(token_data, extra), 2, tmp_path / "killed", timeout_s=120, env=kill)
    survivor, victim = results
    assert victim.returncode == -9
    assert survivor.returncode not in (0, -9), "the other rank must notice, and must not hang"
    assert f"iteration {SAVED_AT + 1:8d}/" in victim.output

    run = pretrain(token_data, extra, tmp_path / "resumed", train_iters=NUM_ITERS)
    for name in ("lm loss", "grad norm"):
        assert run.series(name) == expected.series(name)[SAVED_AT:]


def _once(request, key, make, tmp_path_factory):
    """One run for all parameters of a test."""
    runs = request.config.stash.setdefault(_RUNS, {})
    if key not in runs:
        runs[key] = make(tmp_path_factory.mktemp(key))
    return runs[key]


_RUNS = pytest.StashKey[dict]()
