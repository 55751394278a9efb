"""Other launchers' order of calls on two ranks: stock, and with the overlap that they install; all bits."""

import json

import pytest

from tests.parity.launchers.launchers_worker import NUM_STEPS
from tests.ranks import launch

WORKER = launch.REPO / "tests/parity/launchers/launchers_worker.py"
PAIRS = "--lancet-num-chunks 1 --lancet-pairing on"
CASES = {
    "verl": ("verl", PAIRS),
    "slime": ("slime", PAIRS),
    "ms-swift": ("ms-swift", "--lancet-num-chunks 1"),
    "NeMo-RL": ("NeMo-RL", PAIRS),
}


@pytest.mark.distributed
def test_launchers_train_as_with_stock_to_the_bit(tmp_path):
    out = tmp_path / "found.json"
    results = launch.run(WORKER, [json.dumps(CASES), out], 2, tmp_path, timeout_s=150)
    launch.check(results)
    found = json.loads(out.read_text())
    assert found.keys() == CASES.keys()
    for name, its in found.items():
        assert (its["num_apart"], its["losses"]) == (0, True), name
        assert its["num_tensors"] > 100
        assert its["num_steps"] == NUM_STEPS, name  # and not passes for log-probabilities, nor another model's
        assert its["tokens"][0] == its["tokens"][1] > 0
        assert ("paired" in its["plan"]) == (CASES[name][1] == PAIRS)
        assert its["peak_dw_bytes"] > 0
    output = results[0].output
    assert output.count("Megatron-Lancet report") == len(CASES)
    assert output.count("another model with experts is trained in this process; it stays stock") == 1


@pytest.mark.distributed
def test_virtual_stages_are_installed_when_the_last_is_wrapped(tmp_path):
    launch.check(launch.run(launch.REPO / "tests/parity/launchers/stages_worker.py", [tmp_path], 4, tmp_path, timeout_s=150))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [its["num_apart"] for its in found] == [0, 0, 0, 0]
    for its in found:
        assert (its["stages"], its["num_steps"]) == (2, 2)
        assert its["num_tensors"] > 20
        assert its["peak_dw_bytes"] > 0
        assert "paired" in its["plan"]
    assert found[0]["tokens"] > 0
