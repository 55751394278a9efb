"""The bound on the SMs of all-to-alls reaches the groups that send them, and is refused where it can't act."""

import argparse
import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lancet.errors import UsageError
from megatron_lancet.feature import RunFacts
from megatron_lancet.features.comm_sms.feature import COMM_SMS, CommSmsFlags, check_comm_sms
from megatron_lancet.features.comm_sms.groups import bounded_expert_groups
from megatron_lancet.features.comm_sms.margins import NCCL_LEAST, NCCL_MOST, TE_VARIABLES, norms_leave, products_leave
from megatron_lancet.lab.dry_run.run import examine
from megatron_lancet.patching import around
from megatron_lancet.profiler import facts
from megatron_lancet.profiler.facts import ProfiledModel, key_of
from megatron_lancet.schedule.plan import fixed_plan, plan_without_overlap
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_world import mock_world
from megatron_lancet.testkit.mock.run import MockFlags, mocked_world_of
from megatron_lancet.training import spec
from megatron_lancet.training.megatron import seams
from tests.unit.training.configs import config_with

BOUND = config_with(CommSmsFlags(8))
GPU = torch.device("cuda", 0)
UNSET = -(2**31)
"""NCCL's value for an option that is not set."""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (NCCL_MOST, *NCCL_LEAST, *TE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))


def arguments(**changes: object) -> argparse.Namespace:
    given = {"distributed_backend": "nccl", "expert_model_parallel_size": 2, "nccl_communicator_config_path": None}
    return argparse.Namespace(**{**given, **changes})


def options_of_groups(max_ctas: int | None, high_priority: tuple[str, ...] = ()) -> dict[str, object]:
    """NCCL's options of all groups that Megatron makes, by their descriptions."""
    made = {}

    def create(stock, ranks=None, pg_options=None, group_desc=None, **kwargs):
        made[group_desc] = pg_options
        return stock(ranks, group_desc=group_desc, **kwargs)

    with (
        mock_world(4),
        bounded_expert_groups(max_ctas),
        around(parallel_state, "create_group", create),
    ):
        try:
            parallel_state.initialize_model_parallel(
                expert_model_parallel_size=2,
                create_gloo_process_groups=False,
                high_priority_stream_groups=list(high_priority),
            )
        finally:
            parallel_state.destroy_model_parallel()
    return made


def test_bound_on_sms_reaches_the_groups_of_rows_and_counts_only():
    made = options_of_groups(8)
    bounded = {name: options for name, options in made.items() if options is not None}
    assert bounded.keys() == {"EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"}
    assert len(made) > 10
    for options in bounded.values():
        assert (options.config.max_ctas, options.config.min_ctas) == (8, UNSET)
        assert not options.is_high_priority_stream
    assert set(options_of_groups(None).values()) == {None}


def test_bound_on_sms_keeps_other_options_of_the_groups():
    made = options_of_groups(4, high_priority=("ep", "ep_dp"))
    options = made["EXPERT_MODEL_PARALLEL_GROUP"]
    assert (options.config.max_ctas, options.is_high_priority_stream) == (4, True)
    options = made["EXPERT_DATA_PARALLEL_GROUP"]
    assert (options.config.max_ctas, options.is_high_priority_stream) == (UNSET, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ep": {"max_ctas": 16}}, "where max_ctas of ep is 16"),
        ({"ep": {"min_ctas": 9}}, "where min_ctas of ep is 9"),
        ({"ep": {"max_ctas": 8, "min_ctas": 8, "cga_cluster_size": 2}}, None),
        ({"dp_cp": {"max_ctas": 16}}, None),
    ],
)
def test_bound_on_sms_must_agree_with_users_communicator_config(given, message):
    with bounded_expert_groups(8):
        if message is not None:
            with pytest.raises(UsageError, match=rf"--lancet-comm-sms 8 contradicts .*, {message}\. Drop one"):
                parallel_state.get_nccl_options("ep", given)
            return
        options = parallel_state.get_nccl_options("ep", given)
        assert options.config.max_ctas == 8
        assert options.config.cga_cluster_size == given.get("ep", {}).get("cga_cluster_size", UNSET)
        others = parallel_state.get_nccl_options("dp_cp", {"dp_cp": {"max_ctas": 16}})
        assert others.config.max_ctas == 16


def test_group_that_takes_options_from_elsewhere_is_missing_seam(monkeypatch):
    monkeypatch.setattr(seams, "EXPERT_GROUPS", (*seams.EXPERT_GROUPS, "experts"))
    with pytest.raises(UsageError, match="NCCL's options of group experts in initialize_model_parallel"):
        seams.check_seams()


def test_bound_on_sms_is_accepted_on_gpus_and_in_dry_runs():
    check_comm_sms(arguments(), BOUND, fixed_plan(2), GPU)
    check_comm_sms(arguments(), BOUND, fixed_plan(2), None)
    check_comm_sms(arguments(), config_with(CommSmsFlags(128)), fixed_plan(2), GPU)
    check_comm_sms(arguments(distributed_backend="gloo"), config_with(), None, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "num_sms", "plan", "message"),
    [
        ({}, 8, None, r"this run has stock Megatron modules: it was given --lancet-plan off or has no expert"),
        ({"distributed_backend": "gloo"}, 8, fixed_plan(2), "--distributed-backend is gloo, whose messages"),
        ({"distributed_backend": "mock"}, 20, fixed_plan(2), r"a power of two, 32 here. Pass 16 or 32\."),
        ({"distributed_backend": "mock"}, 256, fixed_plan(2), "the GPU has 132 SMs"),
        ({}, 20, fixed_plan(2), r"a power of two, 32 here. Pass 16 or 32\."),
        ({}, 256, fixed_plan(2), "the GPU has 132 SMs"),
    ],
)
def test_bound_on_sms_is_refused_where_it_can_not_act(changes, num_sms, plan, message):
    with pytest.raises(UsageError, match=rf"--lancet-comm-sms {num_sms} can't act: .*{message}"):
        check_comm_sms(arguments(**changes), config_with(CommSmsFlags(num_sms)), plan, GPU)


def test_bound_on_sms_of_a_mocked_world_needs_a_gpu_and_no_nccl(monkeypatch):
    monkeypatch.setenv("NCCL_MAX_CTAS", "16")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", None)
    mocked = arguments(distributed_backend="mock")
    check_comm_sms(mocked, BOUND, fixed_plan(2), GPU)
    check_comm_sms(mocked, BOUND, fixed_plan(2), None)
    with pytest.raises(UsageError, match="take SMs on a GPU only, and this run is on a CPU"):
        check_comm_sms(mocked, BOUND, fixed_plan(2), torch.device("cpu"))


@pytest.mark.parametrize(("comm_sms", "expected"), [(None, 16), (8, 8)])
def test_bound_on_sms_reaches_the_mocked_link(comm_sms, expected):
    args = argparse.Namespace(
        distributed_backend="mock",
        world_size=4,
        distributed_timeout_minutes=1,
    )
    with mocked_world_of(args, config_with(CommSmsFlags(comm_sms), MockFlags(mock_link=Link(latency_us=1)))):
        assert dist.group.WORLD._link.num_sms == expected


def carveout() -> int | None:
    return torch._C._get_sm_carveout_experimental()


@pytest.mark.parametrize("before", [None, "24"])
def test_compute_leaves_the_sms_of_messages_inside_only(monkeypatch, before):
    name = TE_VARIABLES[0]
    if before is not None:
        monkeypatch.setenv(name, before)
    library = torch.backends.cuda.preferred_blas_library()
    with products_leave(8), norms_leave(8):
        assert [os.environ[name] for name in TE_VARIABLES] == ["8"] * 3
        assert carveout() == 8
        assert torch.backends.cuda.preferred_blas_library() == torch._C._BlasBackend.Cublaslt
    assert torch.backends.cuda.preferred_blas_library() == library != torch._C._BlasBackend.Cublaslt
    assert os.environ.get(name) == before
    assert TE_VARIABLES[1] not in os.environ
    assert carveout() is None


TWO_CHUNKS = fixed_plan(2)


def facts_with(config, plan=TWO_CHUNKS, device=GPU, **changes: object) -> RunFacts:
    return RunFacts(arguments(**changes), config, plan, device=device)


def in_a_step(facts: RunFacts, plan=TWO_CHUNKS) -> int | None:
    """SMs that products leave in a step of a run under a plan."""
    active = COMM_SMS.start(SimpleNamespace(facts=facts, setup=SimpleNamespace(plan=plan)))
    return carveout() if active is None else active.observe(carveout)


def test_flag_sets_both_sides_and_says_so():
    facts = facts_with(BOUND)
    with ExitStack() as stack:
        COMM_SMS.enter(facts, stack)
        assert parallel_state.get_nccl_options("ep", {}).config.max_ctas == 8
        assert os.environ[TE_VARIABLES[1]] == "8"
    assert parallel_state.get_nccl_options("ep", {}) is None
    (line,) = COMM_SMS.announce(facts)
    assert line.startswith("environment: an all-to-all takes at most 8 SMs,")
    assert line.endswith("(--lancet-comm-sms)")


def test_products_of_steps_without_overlap_have_all_sms():
    assert in_a_step(facts_with(BOUND)) == 8
    assert in_a_step(facts_with(BOUND), plan_without_overlap()) is None
    assert carveout() is None


@pytest.mark.parametrize(("major", "expected"), [(8, None), (9, 16), (10, 16), (12, None)])
def test_default_is_for_hopper_and_blackwell(monkeypatch, major, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    config = config_with(CommSmsFlags())
    assert COMM_SMS.message_sms(config, GPU) == expected
    assert COMM_SMS.message_sms(config, torch.device("cpu")) is None
    assert COMM_SMS.message_sms(config) is None  # profiles with and without it share a key: products have all SMs
    assert in_a_step(facts_with(config)) is None  # products have all SMs
    with ExitStack() as stack:
        COMM_SMS.enter(facts_with(config), stack)
        assert TE_VARIABLES[1] not in os.environ
    lines = list(COMM_SMS.announce(facts_with(config)))
    assert len(lines) == (expected is not None)
    assert all(f"at most {expected} SMs" in line for line in lines)


@pytest.mark.parametrize("given", [{"max_ctas": 32}, {"min_ctas": 24}, {"min_ctas": 4}])
def test_default_gives_way_to_users_communicator_config(given):
    facts = facts_with(config_with(CommSmsFlags()), nccl_communicator_config_path="groups.yaml")
    with ExitStack() as stack:
        COMM_SMS.enter(facts, stack)
        options = parallel_state.get_nccl_options("ep", {"ep": given}).config
        assert (options.max_ctas, options.min_ctas) == (given.get("max_ctas", UNSET), given.get("min_ctas", UNSET))
        assert parallel_state.get_nccl_options("tp_ep_mp", {"ep": given}).config.max_ctas == 16
    (line,) = COMM_SMS.announce(facts)
    assert "unless --nccl-communicator-config-path bounds its group" in line


@pytest.mark.parametrize("name", [NCCL_MOST, *NCCL_LEAST, *TE_VARIABLES])
def test_default_gives_way_to_the_users_environment(monkeypatch, name):
    monkeypatch.setenv(name, "24")
    assert COMM_SMS.message_sms(config_with(CommSmsFlags()), GPU) is None
    (line,) = COMM_SMS.announce(facts_with(config_with(CommSmsFlags())))
    assert line == (
        f"environment: {name} is 24, so all-to-alls do not get the default bound here, 16 SMs (--lancet-comm-sms)"
    )


@pytest.mark.parametrize("name", NCCL_LEAST)
@pytest.mark.parametrize("least", ["4", "16", "-1"])
def test_default_stays_with_a_least_number_that_it_allows(monkeypatch, name, least):
    monkeypatch.setenv(name, least)
    (line,) = COMM_SMS.announce(facts_with(config_with(CommSmsFlags())))
    assert line.startswith("environment: an all-to-all takes at most 16 SMs")


def test_stock_modules_have_no_default():
    facts = facts_with(config_with(CommSmsFlags()), plan=None)
    assert in_a_step(facts) is None
    assert not list(COMM_SMS.announce(facts))


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("NCCL_MAX_CTAS", "8", "16"),
        ("NCCL_MIN_CTAS", "8", "9"),
        ("NCCL_MIN_NCHANNELS", "4", "32"),
        ("NCCL_MIN_P2P_NCHANNELS", "1", "16"),
        ("NVTE_EXT_MARGIN_SM", "8", "16"),
        ("NVTE_BWD_LAYERNORM_SM_MARGIN", "8", "0"),
    ],
)
def test_bound_on_sms_must_agree_with_variables_of_nccl(monkeypatch, name, accepted, refused):
    monkeypatch.setenv(name, accepted)
    check_comm_sms(arguments(), BOUND, fixed_plan(2), GPU)
    monkeypatch.setenv(name, refused)
    with pytest.raises(UsageError, match=f"{name} is {refused}"):
        check_comm_sms(arguments(), BOUND, fixed_plan(2), GPU)


@pytest.mark.parametrize("options", [None, SimpleNamespace, lambda: SimpleNamespace(config=SimpleNamespace())])
def test_bound_on_sms_needs_a_torch_that_passes_it_to_nccl(monkeypatch, options):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options))
    with pytest.raises(UsageError, match=r"has no ProcessGroupNCCL\.Options\(\)\.config\.max_ctas"):
        check_comm_sms(arguments(), BOUND, fixed_plan(2), GPU)


def test_bound_on_sms_has_profiles_of_its_own(monkeypatch):
    for name in ("model_facts", "package_versions"):
        monkeypatch.setattr(facts, name, lambda _: {})
    monkeypatch.setattr(facts, "device_name", lambda _: "H100")
    keys = [key_of(ProfiledModel((), GPU, 1, 1, 1, comm_sms)) for comm_sms in (None, 8, 16)]
    assert [key.device for key in keys] == ["H100", "H100, 8 SMs for messages", "H100, 16 SMs for messages"]


def test_bound_on_sms_is_too_late_in_megatrons_own_script(monkeypatch):
    monkeypatch.setenv(spec.FLAGS_VARIABLE, "--lancet-comm-sms 8")
    with pytest.raises(
        UsageError, match=r"LANCET_FLAGS: --lancet-comm-sms does not work with --spec: .* max_ctas of ep"
    ):
        spec._config_from_environment()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", None),
        ("--lancet-plan off", "can't act: this run has stock Megatron modules"),
        ("--expert-model-parallel-size 1", "can't act: this run has stock Megatron modules"),
        ("--distributed-backend gloo", "can't act: it bounds kernels of NCCL"),
        ("--cuda-graph-impl local", "--cuda-graph-impl local does not work"),
    ],
)
def test_bound_on_sms_of_a_command_line(monkeypatch, words, message):
    script = Path(__file__).parents[3] / "launch_args" / "megatron_mixtral_8x7b.args"
    arguments = shlex.split(f"--lancet-dry-run {script.read_text()} --lancet-comm-sms 8 {words}")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py", *arguments])
    if message is None:
        assert examine().plan[0].startswith("auto")
        return
    with pytest.raises(UsageError, match=message):
        examine()
