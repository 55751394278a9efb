"""What bins do not work with, and how a command line says that samples are dealt."""

import sys
from functools import partial
from typing import Any

import pytest

from megatron_lancet.config import PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.features.bins.flags import BinsFlags
from megatron_lancet.features.bins.limits import bin_settings, bins_note, check_bins
from megatron_lancet.registry import features
from megatron_lancet.schedule.plan import ChunkDim
from megatron_lancet.training.arguments import with_features
from megatron_lancet.training.plan.limits import chunked_dim
from megatron_lancet.training.plan.normalize import normalize_args
from tests.unit.training.configs import config_with
from tests.unit.training.validated import set_as_validation_does


def binned(
    pack_documents: bool = True,
    pack_max_tokens: int | None = None,
    pack_attention_cost: float | None = None,
    **settings: Any,
):
    return config_with(BinsFlags(pack_documents, pack_max_tokens, pack_attention_cost), **settings)


SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 4 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 128 --ffn-hidden-size 128 --kv-channels 16 --expert-model-parallel-size 2 --seq-length 48 "
    "--micro-batch-size 4 --transformer-impl local --moe-token-dispatcher-type alltoall --calculate-per-token-loss "
    "--dataloader-type single"
)


@pytest.fixture
def parsed(monkeypatch):
    """Megatron's arguments as validated, with changes."""
    from megatron.training.arguments import parse_args

    from megatron_lancet.training.arguments import add_lancet_arguments

    def make(changes: str = "--lancet-pack-documents"):
        monkeypatch.setattr(sys, "argv", ["pretrain", *SIZES.split(), *changes.split()])
        args = parse_args(partial(add_lancet_arguments, features=features()))
        set_as_validation_does(args)
        args.padded_vocab_size = 512
        return args

    return make


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("--mock-data", "--mock-data: it has no documents. Pass --data-path."),
        ("--dataloader-type cyclic", "--dataloader-type cyclic: samples are drawn"),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", "virtual pipeline stages: each"),
        ("--full-validation", "--full-validation: ranks have different numbers"),
        ("--moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity: it needs the same number"),
        ("--iterations-to-skip 3", "--iterations-to-skip: Megatron shares out"),
        ("--cuda-graph-impl local", "--cuda-graph-impl local: micro-batches differ"),
        ("--spec megatron_lancet.training.spec overlapped_gpt", "Megatron's own script: it reads its own batches"),
    ],
)
def test_what_bins_do_not_work_with_is_refused(parsed, changes, message):
    with pytest.raises(UsageError) as refusal:
        check_bins(parsed(f"--lancet-pack-documents {changes}"), binned())
    assert str(refusal.value).startswith(f"--lancet-pack-documents does not work with {message}")


def test_losses_averaged_by_micro_batch_are_refused(parsed):
    args = parsed()
    check_bins(args, binned())
    args.calculate_per_token_loss = False
    with pytest.raises(UsageError, match=r"Pass --calculate-per-token-loss\.$"):
        check_bins(args, binned())


@pytest.mark.parametrize("flag", ["max_tokens", "attention_cost"])
def test_flags_of_bins_without_bins_are_refused(parsed, flag):
    name = f"--lancet-pack-{flag.replace('_', '-')}"
    with pytest.raises(UsageError, match=f"{name} 8 is for --lancet-pack-documents, which is off"):
        check_bins(parsed(""), binned(pack_documents=False, **{f"pack_{flag}": 8}))


def test_bound_that_ranks_cannot_share_out_is_refused(parsed):
    args = parsed("--lancet-pack-documents --context-parallel-size 2")
    with pytest.raises(UsageError, match="--lancet-pack-max-tokens expects a multiple of 4"):
        check_bins(args, binned(pack_max_tokens=30))


def test_settings_follow_from_the_command_line(parsed):
    args = parsed(
        "--lancet-pack-documents --context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    )
    args.pipeline_model_parallel_size = 3
    found = bin_settings(args, binned(num_chunks=1))
    assert (found.multiple, found.at_least, found.max_tokens, found.num_stages) == (4, 4, 48, 3)
    # A position's projections, two experts, the router and the output layer, against scores and values of a pair.
    per_token = 2 * (4 * 64 * 64 + 2 * 2 * 64 * 128 + 64 * 4) + 512 * 64
    assert found.cost.tokens_per_pair == pytest.approx(2 * 2 * 64 / per_token)
    assert "at most 48 tokens in a micro-batch" in bins_note(found)
    assert bin_settings(args, config_with()) is None


def test_settings_that_are_given(parsed):
    args = parsed("--lancet-pack-documents --lancet-pack-max-tokens 96 --lancet-pack-attention-cost 0.5")
    config = binned(pack_max_tokens=96, pack_attention_cost=0.5)
    assert with_features(args, features()).of(BinsFlags) == config.of(BinsFlags)
    found = bin_settings(args, config)
    assert (found.cost.tokens_per_pair, found.max_tokens, found.at_least) == (0.5, 96, 8)
    assert bin_settings(args, binned(plan=PlanChoice.OFF)).at_least == 1


def test_bins_are_cut_along_the_sequence_only(parsed):
    def sizes(args):
        config = with_features(args, features())
        return [chunked_dim(args, config, dim).size for dim in (ChunkDim.BATCH, ChunkDim.SEQUENCE)]

    assert sizes(parsed("--lancet-pack-documents --lancet-pack-max-tokens 96")) == [1, 96]
    assert sizes(parsed("")) == [4, 48]


def test_packed_documents_are_kept_apart(parsed):
    args = parsed("--lancet-pack-documents --reset-attention-mask")
    lines = normalize_args(args, binned())
    assert (args.dataloader_inter_document_masking, args.reset_attention_mask) == (True, False)
    assert any("--reset-attention-mask is off" in line for line in lines)
    assert any("--dataloader-inter-document-masking is on" in line for line in lines)
