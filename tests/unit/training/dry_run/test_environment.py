"""Variables that a dry run asks for, refuses or names."""

import pytest

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.dry_run.report import Findings
from tests.unit.training.dry_run.lists import FSDP, MIXTRAL

TP = ("--tensor-model-parallel-size", 2, "--expert-tensor-parallel-size", 1, "--sequence-parallel")
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def named_connections(findings: Findings) -> list[str]:
    return [warning for warning in findings.warnings if CONNECTIONS in warning]


@pytest.mark.parametrize("layout", [(), TP], ids=["no TP", "TP"])
def test_dry_run_of_fsdp_leaves_connections_unset(dry_run, monkeypatch, layout):
    assert not any(warning.startswith(CONNECTIONS) for warning in dry_run(MIXTRAL, *FSDP, *layout).warnings)
    monkeypatch.setenv(CONNECTIONS, "32")
    dry_run(MIXTRAL, *FSDP, *layout)
    monkeypatch.setenv(CONNECTIONS, "1")
    with pytest.raises(UsageError, match=f"FSDP requires {CONNECTIONS} > 1 or unset"):
        dry_run(MIXTRAL, *FSDP, *layout)


@pytest.mark.parametrize("number", [None, "32"])
def test_dry_run_with_a_plan_accepts_any_number_of_connections(dry_run, monkeypatch, number):
    if number is not None:
        monkeypatch.setenv(CONNECTIONS, number)
    for more in ((), ("--overlap-moe-expert-parallel-comm",)):
        findings = dry_run(MIXTRAL, *TP, *more)
        assert findings.plan[0].startswith("auto")
        assert named_connections(findings) == []


def test_dry_run_names_one_connection_or_its_lack(dry_run, monkeypatch):
    stock = (*TP, "--lancet-plan", "off")
    (missing,) = named_connections(dry_run(MIXTRAL, *stock))
    assert missing.startswith(f"{CONNECTIONS} is not set: set {CONNECTIONS}=1; without a plan Megatron needs it")
    monkeypatch.setenv(CONNECTIONS, "1")
    assert named_connections(dry_run(MIXTRAL, *stock)) == []
    (cost,) = named_connections(dry_run(MIXTRAL, *TP))
    assert cost.startswith(f"{CONNECTIONS} is 1: ")
    monkeypatch.setenv(CONNECTIONS, "32")
    with pytest.raises(UsageError, match=f"setting the environment variable {CONNECTIONS} to 1"):
        dry_run(MIXTRAL, *stock)


ENVIRONMENT = {
    "offloading": (
        "--fine-grained-activation-offloading --offload-modules core_attn",
        {},
        "NVTE_CPU_OFFLOAD_V1",
        ("1", "0"),
    ),
    "CUDA graphs": (
        "--cuda-graph-impl transformer_engine --cuda-graph-modules attn",
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        "NCCL_GRAPH_REGISTER",
        ("0", "1"),
    ),
}
"""Flags and environment of recipes, the variable that Megatron asks for, its value and one that it refuses."""


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_dry_run_names_variables_that_a_recipe_needs(dry_run, monkeypatch, name):
    flags, environment, variable, (needed, refused) = ENVIRONMENT[name]
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv(variable, raising=False)

    def named():
        return [line for line in dry_run(MIXTRAL, *flags.split()).warnings if variable in line]

    (warning,) = named()
    assert warning.startswith(f"{variable} is not set: set {variable}={needed}; ")
    monkeypatch.setenv(variable, needed)
    assert named() == []
    monkeypatch.setenv(variable, refused)
    with pytest.raises(UsageError, match=variable):
        named()
