"""Configurations drawn from the space of routers, models, axes and ranges: losses and all gradients equal stock's.

More of them: ``python -m tests.te_cpu tests/parity/mocked/random_configs_worker.py RESULT.json 500 SEED``.
"""

import json
from pathlib import Path

import pytest

from tests.draws import factor
from tests.parity.mocked.random_configs_worker import TOLERANCE
from tests.ranks import launch

# Hypothesis's mark makes make test-nightly select the test, although the worker draws.
pytestmark = [pytest.mark.hypothesis, pytest.mark.timeout(420 * factor())]

WORKER = Path(__file__).with_name("random_configs_worker.py")
NUM_EXAMPLES = 30 * factor()


def test_gradients_of_random_configurations_equal_stock(tmp_path, check_gradients, new_seed):
    arguments = [tmp_path / "result.json", NUM_EXAMPLES, *([] if new_seed is None else [new_seed])]
    launch.check(launch.run(WORKER, arguments, 1, tmp_path, timeout_s=400 * factor(), te=True))
    result = json.loads((tmp_path / "result.json").read_text())
    tried, (parameter, error) = result["tried"], result["worst"]
    check_gradients({parameter: error}, TOLERANCE)
    assert tried["compared"] == NUM_EXAMPLES
    assert min(tried["batch chunks"], tried["sequence chunks"], tried["layers of Transformer Engine"]) >= 5
