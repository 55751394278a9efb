"""What --dataloader-inter-document-masking is refused with, each in one line that says what to do."""

import re

import pytest

from megatron_lancet.config import OWN_SPEC, PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.features.documents.limits import shapes_vary
from megatron_lancet.schedule.plan import ChunkDim, fixed_plan
from megatron_lancet.training.plan.attention import needs_own_attention
from megatron_lancet.training.plan.normalize import normalize_args
from megatron_lancet.training.plan.select import choose_plan
from megatron_lancet.training.plan.support import refuse_other_tasks
from tests.unit.training.configs import config_with, cut_with
from tests.unit.training.validated import parsed

FLAG = "--dataloader-inter-document-masking"
TE = ["--transformer-impl", "transformer_engine"]
CONTEXT = ["--context-parallel-size", 2]
SPEC = ["--spec", *OWN_SPEC]
OFF = config_with(plan=PlanChoice.OFF)


@pytest.fixture
def documents(monkeypatch):
    """Megatron's arguments for a run with documents that can overlap, with changes."""
    dropout = ["--hidden-dropout", 0.1, "--attention-dropout", 0.1]
    return lambda *changes: parsed(monkeypatch, "--num-layers=2", FLAG, *dropout, *changes)


@pytest.mark.parametrize("changes", [[], TE])
@pytest.mark.parametrize("config", [config_with(), config_with(num_chunks=2), OFF])
def test_documents_are_not_refused(documents, changes, config):
    args = documents(*changes)
    refuse_other_tasks(args)
    assert (choose_plan(args, config)[0] is None) == (config is OFF)
    assert (needs_own_attention(args) == FLAG) == (changes is not TE)


def test_documents_are_cut_along_the_sequence(documents):
    args = documents("--micro-batch-size", 1, "--reset-attention-mask", "--reset-position-ids")
    assert any("--reset-attention-mask is off" in line for line in normalize_args(args, config_with()))
    assert choose_plan(args, cut_with())[0] == fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE)


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        (
            ["--window-size", "4,0"],
            OFF,
            f"--window-size does not work with torch's fused attention, which {FLAG} needs",
        ),
        (["--softmax-type", "learnable"], OFF, "--softmax-type learnable does not work with torch's fused attention"),
        (CONTEXT, OFF, f"{FLAG} with --context-parallel-size 2 needs the overlapping block"),
        ([*CONTEXT, *TE], config_with(), f"{FLAG} with --context-parallel-size 2 needs the overlapping block"),
        (
            [*CONTEXT, "--mtp-num-layers", 1],
            config_with(),
            f"--mtp-num-layers does not work with {FLAG} and --context-parallel-size 2",
        ),
        (
            ["--hybrid-layer-pattern", "M*E", *TE],
            OFF,
            f"{FLAG} does not work with --hybrid-layer-pattern with M (Mamba): these layers would carry state",
        ),
        ([*SPEC, *CONTEXT], config_with(), f"{FLAG} does not work with --context-parallel-size 2 in Megatron's own"),
        (
            [*SPEC, "--tensor-model-parallel-size", 2, "--sequence-parallel"],
            config_with(),
            f"{FLAG} does not work with --sequence-parallel and --micro-batch-size 4 in Megatron's own script",
        ),
        (
            [*SPEC, "--pipeline-model-parallel-size", 2],
            config_with(),
            f"{FLAG} does not work with --pipeline-model-parallel-size 2 and --micro-batch-size 4 in Megatron's own",
        ),
    ],
)
def test_what_does_not_know_documents_is_refused(documents, changes, config, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        choose_plan(documents(*changes), config)


def test_one_sample_laid_end_to_end_has_the_same_shape(documents):
    one = ["--micro-batch-size", 1, "--pipeline-model-parallel-size", 2]
    assert choose_plan(documents(*SPEC, *one), config_with())[0] is not None
    assert not shapes_vary(documents(*one), has_plan=False)
    assert shapes_vary(documents(), has_plan=False)
    assert not shapes_vary(documents(), has_plan=True)
