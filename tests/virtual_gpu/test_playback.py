"""The log of one small model for each range, played with free launches: does the order permit the overlap?"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest

from megatron_lancet.patching import around
from megatron_lancet.schedule.plan import DwPolicy, OverlapRange, Plan, fixed_plan, paired
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu
from megatron_lancet.testkit.virtual_gpu.log import CollectiveBegins, Entry
from megatron_lancet.testkit.virtual_gpu.playback.device_model import DeviceModel
from megatron_lancet.testkit.virtual_gpu.playback.player import Playback, play
from megatron_lancet.training.platform.cpu import cpu_platform
from tests.features.dedup.cases import dedup
from tests.virtual_gpu.case import Case, run

MESSAGE_US = 20.0
"""Time of each all-to-all: that of ten of the model's kernels, all of which are the smallest."""

NO_OVERLAP, DEDUP = "no overlap", "dedup"
MAX_EXPOSED_SHARES = {"experts": 0.3, "gate": 0.2, "stack": 0.1}
"""By range. Played: 0.22, 0.16 and 0.08; the lower ranges have nothing to compute where a layer ends."""

MAX_EXPOSED_SHARE_IN_PAIRS = 0.05
"""Of a micro-batch with two partners, token counts included. Played: 0.02."""
STEPS_IN_PAIRS = (3, 4)
"""Micro-batches of two steps. What the longer one takes beyond the shorter one is a micro-batch with two partners."""

PLANS = {
    NO_OVERLAP: fixed_plan(1, DwPolicy.NONE),
    **{str(one): fixed_plan(2, overlap_range=one) for one in OverlapRange},
    DEDUP: dedup(fixed_plan(2)),
}


def log_of(plan: Plan, num_scheduled: int | None = None) -> list[Entry]:
    """What a step of the plan enqueues.

    Args:
        num_scheduled: see :class:`Case`.
    """
    log: list[Entry] = []

    @contextmanager
    def watch(stock: Any, gpu: VirtualGpu, *args: Any) -> Iterator[None]:
        with stock(gpu, *args):
            yield
        log.extend(gpu.log)

    def change(stack: ExitStack) -> None:
        stack.enter_context(around(VirtualGpu, "watch", watch))

    run(Case([plan], {"num_layers": 2}, overlap_grad_reduce=False, num_scheduled=num_scheduled), change)
    return log


def device_for(log: list[Entry]) -> DeviceModel:
    """A device on which only all-to-alls take time on the wire, and the host costs nothing."""
    exchanges = (entry.group for entry in log if isinstance(entry, CollectiveBegins) and entry.name == "all_to_all")
    return DeviceModel(link=Link(), links=dict.fromkeys(exchanges, Link(MESSAGE_US))).with_launch_us(0)


@pytest.fixture(scope="module")
def logs() -> dict[str, list[Entry]]:
    with mock.patch.dict(os.environ), cpu_platform():
        return {name: log_of(plan) for name, plan in PLANS.items()}


@pytest.fixture(scope="module")
def logs_in_pairs() -> list[list[Entry]]:
    with mock.patch.dict(os.environ), cpu_platform():
        return [log_of(paired(fixed_plan(1)), number) for number in STEPS_IN_PAIRS]


def played(log: list[Entry], connections: int | None = None) -> Playback:
    return play(log, replace(device_for(log), connections=connections))


def test_ranges_of_the_plan_are_those_of_the_bounds():
    assert set(MAX_EXPOSED_SHARES) == set(OverlapRange)


def test_model_without_overlap_exposes_its_messages(logs):
    assert played(logs[NO_OVERLAP]).exposed_share > 0.85


@pytest.mark.parametrize("name", MAX_EXPOSED_SHARES)
def test_order_of_launches_hides_messages_of_range(name, logs):
    assert played(logs[name]).exposed_share < MAX_EXPOSED_SHARES[name]


def test_order_of_launches_hides_messages_of_dedup(logs):
    """As many as of the plain one: the host does not wait for the number of distinct rows before it makes them.

    When it did, a share of 0.40 was exposed: the device had nothing to do in front of each dispatch.
    """
    assert played(logs[DEDUP]).exposed_share < MAX_EXPOSED_SHARES["stack"]


@pytest.mark.parametrize("name", MAX_EXPOSED_SHARES)
def test_one_connection_exposes_more_of_range(name, logs):
    one, many = played(logs[name], connections=1), played(logs[name])
    assert one.exposed_share > many.exposed_share + 0.1
    assert one.step_us > many.step_us


@dataclass(frozen=True)
class MicroBatch:
    """What a micro-batch with two partners adds to a step."""

    shorter: Playback
    longer: Playback

    @property
    def exposed_share(self) -> float:
        return (self.longer.exposed_us - self.shorter.exposed_us) / (self.longer.wire_us - self.shorter.wire_us)

    @property
    def us(self) -> float:
        return self.longer.step_us - self.shorter.step_us

    @property
    def busy_us(self) -> float:
        return self.longer.busy_us - self.shorter.busy_us


def test_order_of_launches_hides_messages_and_counts_of_pairs(logs_in_pairs):
    middle = MicroBatch(*map(played, logs_in_pairs))
    assert middle.exposed_share < MAX_EXPOSED_SHARE_IN_PAIRS
    assert middle.us < 1.02 * middle.busy_us


def test_one_connection_exposes_more_of_pairs(logs_in_pairs):
    one, many = (MicroBatch(*(played(log, connections) for log in logs_in_pairs)) for connections in (1, None))
    assert one.exposed_share > many.exposed_share + 0.1
    assert one.us > many.us
