"""Megatron-Bridge's own training on two ranks, with one line for the overlap: losses and gradient norms are stock's."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.ranks import launch

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.bridge") is None, reason="needs Megatron-Bridge: make test-bridge"
    ),
]
BRIDGE = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]
WORKER = launch.REPO / "tests/bridge/bridge_worker.py"
TOLERANCE = 2e-6
"""Relative: chunks sum in another order."""


def steps(settings, folder, num_steps=4):
    """Losses and norms of each step, and what the ranks printed. New processes: Bridge needs other versions."""
    out = folder / "steps.json"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(launch.free_port())]
    case = json.dumps({"settings": settings, "num_steps": num_steps})
    done = subprocess.run(
        [sys.executable, *launcher, WORKER, case, out],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([BRIDGE, str(launch.REPO)]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(out.read_text()), done.stdout


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    found, _ = steps(None, tmp_path_factory.mktemp("stock"))
    assert len(found) == 4
    return found


def worst_of(found, expected):
    assert len(found) == len(expected)
    return max(abs(one[name] / other[name] - 1) for one, other in zip(found, expected, strict=True) for name in other)


@pytest.mark.parametrize("settings", [{"num_chunks": 1}, {"num_chunks": 1, "pairing": "on"}])
def test_bridge_trains_as_stock_to_the_bit(stock, settings, tmp_path):
    found, output = steps(settings, tmp_path)
    assert found == stock
    assert "(chunks=1 dim=" in output
    assert "Megatron-Lancet report" in output


def test_bridge_trains_as_stock_in_chunks(stock, tmp_path):
    found, output = steps({"num_chunks": 2}, tmp_path)
    assert worst_of(found, stock) < TOLERANCE
    assert "(chunks=2 dim=" in output
    assert "Megatron-Lancet report" in output


def test_bridge_off_is_stock(stock, tmp_path):
    found, _ = steps({"plan": "off"}, tmp_path)
    assert found == stock
