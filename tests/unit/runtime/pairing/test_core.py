"""Threads that take turns stay on one core for the length of a step, and get theirs back."""

import os
import threading

import pytest
import torch

from megatron_lancet.features.pairing import core
from megatron_lancet.features.pairing.core import SharedCore
from megatron_lancet.features.pairing.pairing import NUM_FREE_STEPS, Pairing
from megatron_lancet.schedule.plan import fixed_plan, paired

OTHER, PARENT, PLAN = 4711, 4242, paired(fixed_plan(1))
MASKS = {OTHER: {1, 2, 3}}


@pytest.fixture
def masks(monkeypatch) -> dict[int, set[int]]:
    """Cores by thread, of a machine with four of which this thread is on the third."""
    own = threading.get_native_id()
    found = {own: {0, 1, 2, 3}, PARENT: {0, 1, 2, 3}, **MASKS}
    monkeypatch.setattr(os, "getppid", lambda: PARENT)

    def cores_of(thread: int) -> set[int]:
        if thread and thread not in found:
            raise ProcessLookupError
        return found[thread or own]

    monkeypatch.setattr(os, "sched_getaffinity", cores_of)
    monkeypatch.setattr(os, "sched_setaffinity", found.__setitem__)
    monkeypatch.setattr(core, "_core_of", lambda _: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return found


def test_threads_share_a_core_inside_only(masks):
    own, late, shared = threading.get_native_id(), 815, SharedCore()
    masks[late] = {0, 3}
    before = dict(masks)

    def fails() -> None:
        with shared.kept(OTHER):
            assert (masks[own], masks[OTHER], masks[late]) == ({2}, {2}, {0, 3})
            shared.keep(late)
            assert masks[late] == {2}
            raise ValueError("a failed step")

    with pytest.raises(ValueError, match="a failed step"):
        fails()
    assert masks == before
    shared.keep(late)
    assert masks == before


def test_thread_that_ends_inside_is_forgotten(masks, monkeypatch):
    """As autograd's may: the others get their cores back."""
    own = threading.get_native_id()

    def set_affinity(thread: int, cores: set[int]) -> None:
        if thread == OTHER and len(cores) > 1:
            raise ProcessLookupError
        masks[thread] = cores

    monkeypatch.setattr(os, "sched_setaffinity", set_affinity)
    with SharedCore().kept(OTHER):
        assert masks[own] == {2}
    assert masks[own] == {0, 1, 2, 3}


def test_own_core_is_read_from_the_system():
    assert core._core_of(threading.get_native_id()) in os.sched_getaffinity(0)


@pytest.mark.parametrize(
    "why_not", ["operators have threads", "one core", "as many ranks as cores", "unknown", "forbidden"]
)
def test_threads_stay_where_they_are_without_a_core_to_share(masks, monkeypatch, why_not):
    own = threading.get_native_id()
    if why_not == "operators have threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    elif why_not == "one core":
        masks[own] = {2}
    elif why_not == "as many ranks as cores":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    elif why_not == "unknown":  # how many of the four ranks run on this node
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        monkeypatch.setattr(core.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(core.dist, "get_world_size", lambda: 4)
    else:

        def refuse(*_):
            raise PermissionError

        monkeypatch.setattr(os, "sched_setaffinity", refuse)
    before = dict(masks)
    with SharedCore().kept(OTHER):
        assert masks == before


def test_rank_bound_to_cores_of_its_own_has_a_core_to_share(masks, monkeypatch):
    """Eight ranks with two cores each: the process that started them has all sixteen."""
    own = threading.get_native_id()
    masks[own], masks[PARENT] = {2, 3}, set(range(16))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with SharedCore().kept(OTHER):
        assert masks[own] == masks[OTHER] == {2}


def test_rank_whose_launcher_has_ended_goes_by_its_own_cores(masks):
    own = threading.get_native_id()
    del masks[PARENT]
    with SharedCore().kept(OTHER):
        assert masks[own] == {2}


def test_process_that_starts_inside_is_not_kept(masks, monkeypatch):
    """Such as a worker of a data loader."""
    in_child = []
    monkeypatch.setattr(os, "register_at_fork", lambda after_in_child: in_child.append(after_in_child))
    shared = SharedCore()
    in_child[0]()
    assert 0 not in masks
    with shared.kept(OTHER):
        in_child[0]()
        assert masks.pop(0) == {0, 1, 2, 3}
    in_child[0]()
    del shared
    in_child[0]()  # of a plan that is no more
    assert 0 not in masks


def test_first_steps_of_a_plan_keep_no_core(masks):
    """Libraries start threads in them, which would inherit the core."""
    pairing, own = Pairing(None, on_cuda=False), threading.get_native_id()

    def kept(has_pair: bool = True) -> bool:
        with pairing.on_one_core(has_pair):
            return masks[own] == {2}

    seen = []
    for _ in range(NUM_FREE_STEPS + 2):
        pairing.begin_step()
        seen.append(kept())
    assert seen == [False] * NUM_FREE_STEPS + [True] * 2
    assert not kept(has_pair=False)
    pairing.run_by([], PLAN)
    pairing.begin_step()
    assert not kept()
