import fcntl
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import data
from tests.order import Alone, pytest_collection_modifyitems  # noqa: F401 - a hook, for all tests
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401 - hooks, for all tests

pytest_plugins = ["tests.draws", "tests.gradient_deviations"]

# A shell starts what it puts into the background with SIGINT ignored, and children inherit that: here and in every
# process that a test starts, Ctrl-C is to end what it ends in a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)

GATE = Path(__file__)
RUNNING = Path(__file__).with_name("__init__.py")
GPU_TESTS = Path(__file__).with_name("gpu")
is_alone = Alone()


@contextmanager
def turn(alone: bool) -> Iterator[None]:
    """One test's time: next to those of other processes, or while none of them runs a test.

    Whoever waits to be alone keeps the gate, so that those that come later don't overtake it.
    """
    with GATE.open() as gate, RUNNING.open() as running:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(running, fcntl.LOCK_UN)  # a forked process may have the file open, too


@pytest.hookimpl(wrapper=True, tryfirst=True)  # first: the time of waiting does not count as the test's
def pytest_runtest_protocol(item):
    with turn(is_alone(item)):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Hides GPUs from all tests but those in tests/gpu: the others train on a CPU, as on a machine without one.

    A process can't hide them once it has used one, so make test-gpu starts tests/gpu in a process of its own.
    """
    folders = [(config.invocation_params.dir / name.partition("::")[0]).resolve() for name in config.args]
    if not all(folder.is_relative_to(GPU_TESTS) for folder in folders):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish():
    """Keeps imported modules and collected tests out of later garbage collections: there are millions of objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def own_environment():
    """Megatron writes variables into the environment when it builds a model: later tests start from the first ones."""
    with restored_environment():
        yield


@contextmanager
def restored_environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def token_data(tmp_path_factory):
    """Prefix of a token data set, for --data-path."""
    return data.write_tokens(tmp_path_factory.mktemp("data") / "tokens_document")


@pytest.fixture(autouse=True)
def metrics_are_forgotten():
    """Megatron keeps the number of layers of the first model, and the shape of the first scale of auxiliary losses."""
    utils = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if utils is not None:
        utils.MoEAuxLossAutoScaler.main_loss_backward_scale = sys.modules["torch"].ones(1)
    yield
    logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if logging is not None:
        logging.destroy_moe_metrics_tracker()
