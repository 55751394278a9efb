"""The table of unsupported flags: each entry is one of Megatron's flags and reads the argument that the flag sets."""

import argparse

import pytest
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_lancet.errors import UsageError
from megatron_lancet.library.run_arguments import StepShape, run_arguments
from megatron_lancet.registry import features
from megatron_lancet.training.arguments import config_from_words
from megatron_lancet.training.plan import support
from megatron_lancet.training.plan.support import (
    OTHER_TASKS,
    RETIRED,
    UNSUPPORTED,
    Unsupported,
    overlap_blockers,
    refuse_other_tasks,
    unsupported,
)
from tests.small_gpt import EXPERTS, SEQ_LENGTH, small_gpt, transformer_config


def parsed(parser, *words: str) -> argparse.Namespace:
    return parser.parse_args(["--transformer-impl", "local", "--moe-token-dispatcher-type", "alltoall", *words])


@pytest.mark.parametrize("entry", [*UNSUPPORTED, *RETIRED, *OTHER_TASKS], ids=lambda entry: entry.flags)
def test_unsupported_flag_is_megatrons_with_its_argument(parser, entry):
    for flag in entry.flags.split():
        action = parser._option_string_actions[flag]
        assert entry.refused is not None or action.dest == flag.removeprefix("--").replace("-", "_")
    assert list(entry.found_in(parsed(parser))) == []


def test_no_flag_is_in_two_entries():
    flags = [flag for entry in (*UNSUPPORTED, *RETIRED, *OTHER_TASKS) for flag in entry.flags.split()]
    assert sorted(flags) == sorted(set(flags))


def test_unsupported_value_is_shown_where_it_matters(parser):
    shards = ["--expert-tensor-parallel-num-weight-shards", "4"]
    args = parsed(parser, *shards, "--moe-latent-size", "8", "--cuda-graph-impl", "local")
    flags = [flag for flag, _ in unsupported(args, validated=True)]
    assert flags == ["--expert-tensor-parallel-num-weight-shards 4", "--moe-latent-size", "--cuda-graph-impl local"]
    assert list(unsupported(parsed(parser, *shards, "--expert-tensor-parallel-size", "4"), validated=True)) == []


def test_unsupported_flag_with_zero(parser):
    args = parsed(parser, "--save-dgrads-interval", "0", "--mtp-num-layers", "0")
    assert [flag for flag, _ in unsupported(args, validated=True)] == ["--save-dgrads-interval"]
    assert list(Unsupported("--mtp-num-layers", None, "", even_zero=True).found_in(args)) == ["--mtp-num-layers"]


FIELDS = {
    "moe_router_padding_for_quantization": True,
    "moe_router_padding_for_fp8": True,
    "enable_autocast": True,
    "quant_recipe": object(),
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.usefixtures("one_rank")
def test_field_that_only_a_library_sets_is_unsupported(name):
    """The command line has no flag for it, or maps the flag; a model's own configuration has it."""
    model = small_gpt(transformer_config(**EXPERTS))
    args = run_arguments([model], DistributedDataParallelConfig(), StepShape(1, SEQ_LENGTH, 1), 1)
    assert list(unsupported(args, validated=True)) == []
    setattr(model.config, name, FIELDS[name])
    args = run_arguments([model], DistributedDataParallelConfig(), StepShape(1, SEQ_LENGTH, 1), 1)
    ((found, advice),) = unsupported(args, validated=True)
    assert (name in found, advice) == (True, "unset in the configuration")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--checkpoint-activations"],
            r"Megatron has retired --checkpoint-activations: pass --recompute-granularity\.",
        ),
        (["--fim-data"], "does not support --fim-data "),
        (["--inprocess-restart"], "does not support --inprocess-restart "),
        (["--yaml-cfg", "a.yaml"], "does not support --yaml-cfg "),
    ],
)
def test_other_tasks_and_retired_flags_are_refused(parser, words, message):
    with pytest.raises(UsageError, match=message):
        refuse_other_tasks(parsed(parser, *words))
    refuse_other_tasks(parsed(parser))


@pytest.mark.parametrize(
    "words",
    [
        "--lancet-comm-priority all-to-all-first",
        "--lancet-comm-sms 8",
        "--lancet-max-expert-rows 8",
        "--lancet-expert-placement placement.json",
    ],
)
def test_flags_that_need_the_overlap_have_no_stock_fallback(monkeypatch, words):
    """A run that can't overlap is refused, and does not fall back to stock modules."""
    monkeypatch.setattr(support, "unsupported", lambda args, validated: [("--some-flag", "drop it")])
    args, config = argparse.Namespace(expert_model_parallel_size=2), config_from_words(words.split(), features())
    assert overlap_blockers(args, config_from_words([], features())) != []
    assert overlap_blockers(args, config) == []
    assert config.explicit_plan_flags() == {}
