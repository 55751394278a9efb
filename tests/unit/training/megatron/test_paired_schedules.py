"""Steps in pairs: which micro-batches are at an end, with Megatron's tables of interleaved pipelines."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.pipeline_parallel import schedules

from megatron_lancet.features.pairing import schedules as paired_schedules
from megatron_lancet.features.pairing.pairing import Pairing
from megatron_lancet.schedule.plan import fixed_plan, paired


def order_of(num_micro_batches: int, num_stages: int, group: int) -> paired_schedules._Order:
    """By Megatron's own table of virtual micro-batches."""
    table = schedules.get_schedule_table(num_micro_batches, num_stages, group)

    def microbatch_of(number: int, forward: bool) -> int:
        assert forward  # Megatron's function knows no other
        return table[number][0]

    def stage_of(number: int, forward: bool) -> int:
        return table[number][1] if forward else num_stages - 1 - table[number][1]

    return paired_schedules._Order(len(table), microbatch_of, stage_of)


@pytest.mark.parametrize("num_warmup", [3, 5, 8])
@pytest.mark.parametrize(("num_micro_batches", "num_stages", "group"), [(4, 2, 2), (8, 2, 2), (6, 3, 2), (5, 2, 3)])
def test_micro_batch_without_a_partner_is_at_an_end(num_micro_batches, num_stages, group, num_warmup):
    """Compared with the whole step, written down: forward n is during backward n - warm-up."""
    order = order_of(num_micro_batches, num_stages, group)
    numbers = range(order.num_ids)
    backward_of = {
        (order.microbatch_of(number, forward=True), order.stage_of(number, forward=False)): number for number in numbers
    }
    for number in numbers:
        own = backward_of[order.microbatch_of(number, forward=True), order.stage_of(number, forward=True)]
        forward_is_alone = number < num_warmup
        backward_is_alone = own + num_warmup >= order.num_ids
        beside = None if forward_is_alone else number - num_warmup
        assert order.is_at_end(number, beside) == (forward_is_alone or backward_is_alone), number


def test_stages_ask_megatron_for_pairs_and_for_none():
    stages = [SimpleNamespace(config=SimpleNamespace(overlap_moe_expert_parallel_comm=False)) for _ in range(2)]
    for is_paired in (True, False):
        Pairing(None, on_cuda=False).run_by(stages, paired(fixed_plan(1)) if is_paired else fixed_plan(1))
        assert [stage.config.overlap_moe_expert_parallel_comm for stage in stages] == [is_paired] * 2


@pytest.mark.parametrize("error", [None, KeyError])
def test_model_of_a_run_asks_for_no_pairs_after_it(error):
    """The configuration is the user's: another training with it would meet Megatron's own overlap."""
    stages: list[Any] = []
    with nullcontext() if error is None else pytest.raises(error), Pairing.steps(lambda: stages):
        stages += [SimpleNamespace(config=SimpleNamespace(overlap_moe_expert_parallel_comm=False)) for _ in range(2)]
        Pairing(None, on_cuda=False).run_by(stages, paired(fixed_plan(1)))
        assert [stage.config.overlap_moe_expert_parallel_comm for stage in stages] == [True, True]
        if error is not None:
            raise error
    assert [stage.config.overlap_moe_expert_parallel_comm for stage in stages] == [False, False]


def test_model_that_is_there_asks_for_pairs_as_before():
    stages = [SimpleNamespace(config=SimpleNamespace(overlap_moe_expert_parallel_comm=True))]
    for _ in range(2):
        with Pairing.steps(lambda: stages):
            assert stages[0].config.overlap_moe_expert_parallel_comm
        assert stages[0].config.overlap_moe_expert_parallel_comm


def test_megatrons_schedules_are_its_own_outside_of_the_context():
    names = (
        "combined_1f1b_schedule_for_no_pipelining",
        "combined_1f1b_schedule_for_interleaved_pipelining",
    )
    stock = [getattr(schedules, name) for name in names]
    with paired_schedules.paired_schedules(list):
        assert all(getattr(schedules, name) is not one for name, one in zip(names, stock, strict=True))
    assert [getattr(schedules, name) for name in names] == stock
