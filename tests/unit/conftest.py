"""Unit tests start no process: one that does fails, and belongs into tests/cli, tests/faults or tests/parity."""

import os
import sys
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_lancet.training.platform.cpu import cpu_platform

STARTS = frozenset(["subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"])
"""Audit events of Python: https://docs.python.org/3/library/audit_events.html."""


class ProcessWatch:
    """Keeps the audit events with which the running test started a process. Python can't remove an audit hook."""

    def __init__(self) -> None:
        self.events: list[str] | None = None

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.events is not None and event in STARTS:
            self.events.append(f"{event}{arguments[:2]}")


_watch = ProcessWatch()
sys.addaudithook(_watch.hook)


@pytest.fixture(autouse=True)
def no_process_is_started():
    _watch.events = []
    yield
    started, _watch.events = _watch.events, None
    assert not started, f"a unit test started a process: {started[0]}. Move the test to tests/cli, faults or parity."


@pytest.fixture(scope="module")
def one_rank():
    """Megatron's process groups of a single process; building a model sets environment variables, for here only."""
    with mock.patch.dict(os.environ), cpu_platform():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
