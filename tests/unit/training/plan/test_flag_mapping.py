"""Megatron's overlap flags: with a plan they mean the plan, else they keep their meaning."""

import copy
import re
import sys
from pathlib import Path

import pytest
from megatron.core.transformer.moe import moe_utils

from megatron_lancet.config import PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.features.pairing.feature import PairingChoice
from megatron_lancet.schedule.plan import fixed_plan, paired
from megatron_lancet.training.plan.flag_mapping import map_overlap_flags, refuse_mapped_flags
from megatron_lancet.training.plan.select import choose_plan
from megatron_lancet.training.plan.support import OVERLAP_FLAGS
from tests.unit.training.configs import config_with
from tests.unit.training.validated import set_as_validation_does

MOE = "--num-experts 8 --expert-model-parallel-size 2 --micro-batch-size 4 --seq-length 32 --transformer-impl local"


@pytest.fixture
def parsed(monkeypatch):
    """Megatron's arguments as its parser leaves them."""
    from megatron.training.arguments import parse_args

    def parse(flags: str):
        monkeypatch.setattr(sys, "argv", ["pretrain", *f"{MOE} {flags}".split()])
        args = parse_args(ignore_unknown_args=True)
        set_as_validation_does(args)
        return args

    return parse


def test_every_overlap_flag_becomes_the_plan_and_is_named(parsed):
    args = parsed(f"--moe-token-dispatcher-type alltoall --wgrad-deferral-limit 3 {' '.join(OVERLAP_FLAGS)}")
    assert all(getattr(args, name) for name in OVERLAP_FLAGS.values())
    assert map_overlap_flags(args, config_with()) == (
        f"the plan does what {', '.join(OVERLAP_FLAGS)} ask for, and may pair backwards with forwards"
    )
    assert not any(getattr(args, name) for name in OVERLAP_FLAGS.values())
    assert args.wgrad_deferral_limit == 0
    assert choose_plan(args, config_with())[0] == paired(fixed_plan(1))


@pytest.mark.parametrize(
    ("flag", "config", "may_pair"),
    [
        ("--overlap-moe-expert-parallel-comm", config_with(), True),
        ("--overlap-moe-expert-parallel-comm", config_with(pairing=PairingChoice.ON), False),
        ("--overlap-moe-expert-parallel-comm", config_with(pairing=PairingChoice.OFF), False),
        ("--overlap-moe-expert-parallel-comm", config_with(plan=Path("plan.json")), False),
        ("--delay-wgrad-compute", config_with(), False),
        ("--delay-wgrad-compute", config_with(plan=Path("plan.json")), False),
    ],
)
def test_line_of_the_mapping_says_that_the_plan_may_pair(parsed, flag, config, may_pair):
    line = map_overlap_flags(parsed(f"--moe-token-dispatcher-type alltoall {flag}"), config)
    more = ", and may pair backwards with forwards" if may_pair else ""
    assert line == f"the plan does what {flag} asks for{more}"


def test_other_dispatchers_become_all_to_alls(parsed):
    args = parsed(
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-hybridep-num-sms 8 "
        "--moe-permute-fusion"
    )
    line = map_overlap_flags(args, config_with())
    assert line is not None
    what = "one row per token and rank"
    assert line.startswith(
        f"--moe-token-dispatcher-type flex runs as the plan's all-to-alls, {what}; --moe-permute-fusion "
    )
    assert (args.moe_token_dispatcher_type, args.moe_permute_fusion) == ("alltoall", False)
    assert (args.moe_flex_dispatcher_backend, args.moe_hybridep_num_sms) == ("deepep", None)
    by_default = parsed("")
    assert "allgather runs as" in str(map_overlap_flags(by_default, config_with()))


def test_fused_permutation_stays_where_te_has_its_kernels(parsed, monkeypatch):
    args = parsed("--moe-token-dispatcher-type alltoall --moe-permute-fusion")
    for name in vars(moe_utils):
        if re.fullmatch("fused_(permute|unpermute|permute_with_probs|sort_chunks_by_index(_with_probs)?)", name):
            monkeypatch.setattr(moe_utils, name, object())
    assert map_overlap_flags(args, config_with()) is None
    assert args.moe_permute_fusion
    monkeypatch.setattr(moe_utils, "fused_unpermute", None)
    assert "--moe-permute-fusion is replaced" in str(map_overlap_flags(args, config_with()))
    assert not args.moe_permute_fusion


def test_flag_mapping_names_dropped_flags(parsed):
    args = parsed(
        "--moe-token-dispatcher-type alltoall --context-parallel-size 2 --cp-comm-type a2a "
        "--high-priority-a2a-comm-stream --high-priority-stream-groups ep"
    )
    assert map_overlap_flags(args, config_with()) == "--cp-comm-type a2a is replaced by gathered keys and values"
    # Both ask for what the plan's stream has anyway.
    assert (args.high_priority_a2a_comm_stream, args.high_priority_stream_groups) == (True, ["ep"])
    assert map_overlap_flags(args, config_with()) is None


def test_padding_of_the_router_is_left_to_the_experts(parsed):
    flags = ["--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8"]
    words = f"--moe-token-dispatcher-type alltoall --transformer-impl transformer_engine {' '.join(flags)}"
    args = parsed(f"{words} --fp8-format hybrid")
    line = map_overlap_flags(args, config_with())
    assert line == f"{' '.join(flags)}: rows are padded by the experts instead of the router"
    assert not args.moe_router_padding_for_quantization
    assert not args.moe_router_padding_for_fp8
    without_fp8 = parsed(words)
    assert map_overlap_flags(without_fp8, config_with()) is None
    assert without_fp8.moe_router_padding_for_fp8


def test_flag_mapping_keeps_context_parallelism_of_te(parsed):
    words = "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
    args = parsed(f"--moe-token-dispatcher-type alltoall --transformer-impl transformer_engine {words}")
    assert map_overlap_flags(args, config_with()) is None
    assert (args.cp_comm_type, args.hierarchical_context_parallel_sizes) == (["a2a+p2p"], [2, 2])


def test_flag_mapping_of_nothing_is_silent(parsed):
    args = parsed("--moe-token-dispatcher-type alltoall")
    before = copy.deepcopy(vars(args))
    assert map_overlap_flags(args, config_with()) is None
    assert vars(args) == before


def test_overlap_flags_that_come_too_late_are_refused(parsed):
    args = parsed("--moe-token-dispatcher-type alltoall --moe-shared-expert-overlap")
    with pytest.raises(
        UsageError, match=r"can't be mapped \(the plan does what --moe-shared-expert-overlap asks for\)"
    ):
        refuse_mapped_flags(args, config_with())
    assert args.moe_shared_expert_overlap
    refuse_mapped_flags(args, config_with(plan=PlanChoice.OFF))


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ("", config_with(plan=PlanChoice.OFF)),
        ("--expert-model-parallel-size 1", config_with()),
        ("--num-experts 0", config_with()),
    ],
)
def test_overlap_flags_keep_their_meaning_without_a_plan(parsed, flags, config):
    args = parsed(f"{flags} --moe-token-dispatcher-type flex --moe-permute-fusion {' '.join(OVERLAP_FLAGS)}")
    before = copy.deepcopy(vars(args))
    assert map_overlap_flags(args, config) is None
    assert vars(args) == before
