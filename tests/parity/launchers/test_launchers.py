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
    "slime, one chunk": ("slime", "--lancet-num-chunks 1"),
    "ms-swift": ("ms-swift", PAIRS),
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
