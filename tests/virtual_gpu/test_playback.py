"""The log of one small model for each range, played with free launches: does the order permit the overlap?"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from megatron_lancet.mock.link import Link
from megatron_lancet.patching import around
from megatron_lancet.schedule.plan import DwPolicy, OverlapRange, Plan, fixed_plan
from megatron_lancet.training.platform.cpu import cpu_platform
from megatron_lancet.virtual_gpu.device import VirtualGpu
from megatron_lancet.virtual_gpu.log import CollectiveBegins, Entry
from megatron_lancet.virtual_gpu.playback.device_model import DeviceModel
from megatron_lancet.virtual_gpu.playback.player import Playback, play
from tests.virtual_gpu.case import Case, run

MESSAGE_US = 20.0
"""Time of each all-to-all: that of ten of the model's kernels, all of which are the smallest."""

NO_OVERLAP = "no overlap"
MAX_EXPOSED_SHARES = {"experts": 0.3, "gate": 0.2, "layer": 0.2, "stack": 0.1}
"""By range. Played: 0.22, 0.16, 0.14 and 0.08; the lower ranges have nothing to compute where a layer ends."""

PLANS = {
    NO_OVERLAP: fixed_plan(1, DwPolicy.NONE),
    **{str(one): fixed_plan(2, overlap_range=one) for one in OverlapRange},
}


def log_of(plan: Plan) -> list[Entry]:
    """What a step of the plan enqueues."""
    log: list[Entry] = []

    @contextmanager
    def watch(stock: Any, gpu: VirtualGpu, *args: Any) -> Iterator[None]:
        with stock(gpu, *args):
            yield
        log.extend(gpu.log)

    def change(stack: ExitStack) -> None:
        stack.enter_context(around(VirtualGpu, "watch", watch))

    run(Case([plan], {"num_layers": 2}, overlap_grad_reduce=False), change)
    return log


def device_for(log: list[Entry]) -> DeviceModel:
    """A device on which only all-to-alls take time on the wire, and the host costs nothing."""
    exchanges = (entry.group for entry in log if isinstance(entry, CollectiveBegins) and entry.name == "all_to_all")
    return DeviceModel(link=Link(), links=dict.fromkeys(exchanges, Link(MESSAGE_US))).with_launch_us(0)


@pytest.fixture(scope="module")
def logs() -> dict[str, list[Entry]]:
    with mock.patch.dict(os.environ), cpu_platform():
        return {name: log_of(plan) for name, plan in PLANS.items()}


def played(log: list[Entry], connections: int | None = None) -> Playback:
    return play(log, replace(device_for(log), connections=connections))


def test_ranges_of_the_plan_are_those_of_the_bounds():
    assert set(MAX_EXPOSED_SHARES) == set(OverlapRange)


def test_model_without_overlap_exposes_its_messages(logs):
    assert played(logs[NO_OVERLAP]).exposed_share > 0.85


@pytest.mark.parametrize("name", MAX_EXPOSED_SHARES)
def test_order_of_launches_hides_messages_of_range(name, logs):
    assert played(logs[name]).exposed_share < MAX_EXPOSED_SHARES[name]


@pytest.mark.parametrize("name", MAX_EXPOSED_SHARES)
def test_one_connection_exposes_more_of_range(name, logs):
    one, many = played(logs[name], connections=1), played(logs[name])
    assert one.exposed_share > many.exposed_share + 0.1
    assert one.step_us > many.step_us
