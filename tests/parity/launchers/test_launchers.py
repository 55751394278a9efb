"""Other launchers' order of calls on two ranks: stock, and with the overlap that they install; all bits."""

import json
import subprocess
import sys

import pytest

from megatron_lancet.errors import USAGE_EXIT_CODE
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
REFUSED = {
    "": "expected a fixed plan, found --lancet-plan auto, but the shapes of micro-batches change here: pass "
    "--lancet-num-chunks 1, for pairs also --lancet-pairing on, or --lancet-plan off.",
    "--lancet-num-chunks 2 --lancet-chunk-dim sequence": "expected one chunk, found a plan with 2, but the shapes",
    "--lancet-num-chunks 1 --lancet-max-expert-rows 50": "--lancet-max-expert-rows is for micro-batches of one shape",
}
"""Flags, and how the error begins when DDP wraps the model."""


@pytest.mark.distributed
def test_launchers_train_as_with_stock_to_the_bit(tmp_path):
    out = tmp_path / "found.json"
    results = launch.run(WORKER, [json.dumps(CASES), json.dumps(list(REFUSED)), out], 2, tmp_path, timeout_s=150)
    launch.check(results)
    found = json.loads(out.read_text())
    for flags, begin in REFUSED.items():
        assert found["refused"].pop(flags).startswith(begin)
    assert found.pop("refused") == {}
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
    worker = launch.REPO / "tests/parity/launchers/stages_worker.py"
    launch.check(launch.run(worker, [tmp_path], 4, tmp_path, timeout_s=150))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [its["num_apart"] for its in found] == [0, 0, 0, 0]
    for its in found:
        assert (its["stages"], its["num_steps"]) == (2, 2)
        assert its["num_tensors"] > 20
        assert its["peak_dw_bytes"] > 0
        assert "paired" in its["plan"]
    assert found[0]["tokens"] > 0


def imported(flags=None, verl=None):
    """Loads the plug-in as verl does, in a process without Megatron; what is printed in the end are its imports."""
    code = [
        "import sys",
        *([] if verl is None else [f"sys.path.insert(0, {str(verl)!r})", "import verl"]),
        "from importlib.metadata import EntryPoint",
        "EntryPoint('lancet', 'megatron_lancet.library.launchers.verl', 'verl.plugins').load()",
        "print(any(name in sys.modules for name in ('torch', 'megatron')))",
        "print([type(finder).__name__ for finder in sys.meta_path].count('BehindEngine'))",
    ]
    environment = {"PYTHONPATH": str(launch.REPO)} | ({} if flags is None else {"LANCET_FLAGS": flags})
    return subprocess.run([sys.executable, "-c", "\n".join(code)], env=environment, capture_output=True, text=True)


def test_plug_in_imports_nothing_and_waits_for_flags():
    run = imported()
    assert (run.returncode, run.stdout.split()) == (0, ["False", "0"])


def test_plug_in_waits_for_the_engine(tmp_path):
    folder = tmp_path / "verl/workers/engine/megatron"
    folder.mkdir(parents=True)
    for name in (tmp_path / "verl/__init__.py", folder / "transformer_impl.py"):
        name.touch()
    run = imported("--lancet-num-chunks 1", tmp_path)
    assert (run.returncode, run.stdout.split()) == (0, ["False", "1"])


def test_plug_in_complains_aloud_of_a_verl_without_engine(tmp_path):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl/__init__.py").touch()
    run = imported("--lancet-num-chunks 1", tmp_path)
    assert run.returncode == USAGE_EXIT_CODE
    assert "expected verl.workers.engine.megatron.transformer_impl in the verl that loads" in run.stderr
