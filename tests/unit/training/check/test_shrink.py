"""What a check keeps of a launch: the flags that Megatron would get."""

import argparse
import shlex
from pathlib import Path

import numpy as np
import pytest

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.check.layout import Layout
from megatron_lancet.lab.check.run import run_check
from megatron_lancet.lab.check.samples import RandomTokens
from megatron_lancet.lab.check.shrink import Shrunk, shrink
from megatron_lancet.lab.check.words import read_command_line

LISTS = Path(__file__).parents[3] / "launch_args"
SMALL = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --num-experts 16 --moe-router-topk 4"


def shrunk(text: str, num_ranks: int | None = None, max_ranks: int = 8, padding: bool = False) -> Shrunk:
    return shrink(read_command_line(shlex.split(text)), num_ranks, max_ranks, padding)


def value(words: list[str], flag: str) -> str | None:
    """The last one counts, as for Megatron."""
    positions = [i for i, word in enumerate(words) if word == flag]
    return words[positions[-1] + 1] if positions else None


@pytest.mark.parametrize("name", sorted(path.stem for path in LISTS.glob("*.args")))
def test_real_scripts_shrink_to_at_most_eight_ranks(name):
    found = shrunk((LISTS / f"{name}.args").read_text())
    assert 2 <= found.layout.num_ranks <= 8
    # What was shrunk is a command line of Megatron again, of one small model.
    again = read_command_line([*found.words, *found.layout.words()]).args
    assert (again.hidden_size, again.seq_length, again.micro_batch_size) == (32, 16, 2)
    assert again.num_layers % (found.layout.pipeline * found.layout.virtual) == 0
    assert not again.bf16
    assert again.load is None
    assert again.data_path is None


def test_axes_and_features_stay():
    found = shrunk(
        f"{SMALL} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 "
        "--num-virtual-stages-per-pipeline-rank 2 --sequence-parallel --use-distributed-optimizer --swiglu "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-shared-expert-intermediate-size "
        "512 --calculate-per-token-loss --recompute-granularity selective --recompute-modules moe layernorm "
        "--moe-layer-freq ([0]*1+[1]*7) --lancet-dispatch dedup --lancet-plan nowhere.json"
    )
    assert found.layout == Layout(2, 2, 2, 1, 2, 2, True, 2)
    for flag in ("--use-distributed-optimizer", "--swiglu", "--calculate-per-token-loss"):
        assert flag in found.words
    assert value(found.words, "--recompute-modules") == "moe"
    assert "layernorm" not in found.words
    assert value(found.words, "--moe-router-load-balancing-type") == "seq_aux_loss"
    assert value(found.words, "--moe-aux-loss-coeff") == "0.1"
    assert value(found.words, "--moe-layer-freq") == "([0]*1+[1]*3)"
    assert value(found.words, "--num-layers") == "4"
    assert found.ours == ["--lancet-dispatch", "dedup"]


def test_changes_name_what_is_not_checked():
    found = shrunk(
        f"{SMALL} --bf16 --moe-token-dispatcher-type flex --moe-router-load-balancing-type global_aux_loss "
        "--moe-expert-capacity-factor 1.5 --mtp-num-layers 2 --context-parallel-size 2 --cuda-graph-impl local"
    )
    text = "\n".join(found.changes)
    for part in (
        "low precision (--bf16)",
        "CUDA graphs (--cuda-graph-impl)",
        "in place of flex",
        "aux_loss in place of",
    ):
        assert part in text
    assert text.count("by definition") == 3
    assert value(found.words, "--moe-expert-capacity-factor") == "4.0"
    assert "--mtp-num-layers" not in found.words


def test_capacity_that_drops_nothing_is_left_out():
    assert "--moe-expert-capacity-factor" not in shrunk(f"{SMALL} --moe-expert-capacity-factor -1").words


def test_recompute_that_is_not_checked_is_named():
    found = shrunk(f"{SMALL} --recompute-granularity selective --recompute-modules layernorm mlp moe_act")
    assert value(found.words, "--recompute-modules") == "mlp"
    assert any("no recompute of layernorm, moe_act" in change for change in found.changes)


def test_data_parallelism_is_kept_where_the_launch_has_it():
    assert shrunk(f"{SMALL} --tensor-model-parallel-size 4", num_ranks=4).layout.data == 1
    assert shrunk(f"{SMALL} --tensor-model-parallel-size 4", num_ranks=8).layout.data == 2
    assert shrunk(f"{SMALL} --tensor-model-parallel-size 4", max_ranks=2).layout.data == 1


def test_padding_leaves_out_what_megatron_does_not_define():
    text = f"{SMALL} --pipeline-model-parallel-size 2 --context-parallel-size 2"
    assert str(shrunk(text, padding=True).layout) == "DP 2"
    assert shrunk(f"{text} --calculate-per-token-loss", padding=True).layout.context == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{SMALL} --use-megatron-fsdp", "--use-megatron-fsdp is not checked"),
        ("--num-layers 2", "a check needs the model's sizes"),
        (f"{SMALL} --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", "take 4 ranks"),
        (f"{SMALL} --no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("word", "unrecognized arguments: word"),
    ],
)
def test_launches_that_are_not_checked_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        shrunk(text, max_ranks=2)


def test_documents_are_a_mask_for_stock():
    found = shrunk(
        f"{SMALL} --dataloader-inter-document-masking --mtp-num-layers 1 --pipeline-model-parallel-size 4 "
        "--num-virtual-stages-per-pipeline-rank 2"
    )
    assert found.stock_mask
    assert found.ours == ["--dataloader-inter-document-masking", "--lancet-num-chunks", "2"]
    assert not {"--dataloader-inter-document-masking", "--mtp-num-layers"} & set(found.words)
    assert "--no-create-attention-mask-in-dataloader" not in found.words
    assert found.layout.virtual == 1
    text = "\n".join(found.changes)
    for part in ("stock gets a mask of documents", "no virtual stages", "no multi-token prediction: with a mask"):
        assert part in text
    plain = shrunk(SMALL)
    assert not plain.stock_mask
    assert "--no-create-attention-mask-in-dataloader" in plain.words


def test_samples_have_mask_bounds_and_positions_of_documents():
    documents = RandomTokens(50, 16, 64, seed=1, padding=False, documents=True)
    samples = [documents[index] for index in range(len(documents))]
    for sample in samples:
        bounds = sample["cu_seqlens"].unique_consecutive().tolist()
        assert (bounds[0], bounds[-1]) == (0, 16)
        assert sample["position_ids"].tolist() == [i for size in np.diff(bounds) for i in range(size)]
        for row, seen in enumerate(~sample["attention_mask"][0]):
            first = row - int(sample["position_ids"][row])
            assert seen.tolist() == [first <= column <= row for column in range(16)]
    assert len({tuple(sample["cu_seqlens"].tolist()) for sample in samples}) > 30
    whole = RandomTokens(1, 16, 64, seed=1, padding=False)[0]
    assert whole["cu_seqlens"].unique_consecutive().tolist() == [0, 16]
    assert whole["position_ids"].tolist() == list(range(16))


def test_bins_become_samples_of_one_length_with_documents():
    found = shrunk(f"{SMALL} --lancet-pack-documents --lancet-pack-max-tokens 64 --calculate-per-token-loss")
    assert (found.ours, found.stock_mask) == (["--dataloader-inter-document-masking", "--lancet-num-chunks", "2"], True)
    assert any("(--lancet-pack-documents)" in change for change in found.changes)


def test_te_layers_stay_or_are_said_to_be_replaced():
    launch = f"{SMALL} --moe-grouped-gemm --moe-permute-fusion"
    kept = shrink(read_command_line(shlex.split(launch)), None, 8, with_kernels=True)
    assert value(kept.words, "--transformer-impl") == "transformer_engine"
    assert "--moe-grouped-gemm" in kept.words
    assert "not checked: Transformer Engine's kernels (--moe-permute-fusion)" in kept.changes
    local = shrunk(launch)
    assert value(local.words, "--transformer-impl") == "local"
    assert "--moe-grouped-gemm" not in local.words
    assert "local layers in place of Transformer Engine's, which need a GPU" in local.changes
    asked_for = shrink(read_command_line(shlex.split(f"{SMALL} --transformer-impl local")), None, 8, with_kernels=True)
    assert value(asked_for.words, "--transformer-impl") == "local"
    assert not any("Transformer Engine" in change for change in asked_for.changes)


def test_te_layers_that_cant_be_imported_are_refused():
    options = argparse.Namespace(te=True, trust_script=False, dry_run=False)
    with pytest.raises(UsageError, match=r"^--te: Transformer Engine can't be imported here: .* need a GPU.*Drop it"):
        run_check(options, shlex.split(SMALL))


def test_virtual_stages_of_a_written_layout_are_kept():
    assert shrunk((LISTS / "modelzoo_deepseek_v3_h100_128k.args").read_text()).layout.virtual == 2  # of 32 / 8
    with pytest.raises(UsageError, match="Invalid layer character: x"):
        shrunk(f"{SMALL} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ex|L")


def test_reductions_that_are_not_checked_are_named():
    text = f"{SMALL} --num-distributed-optimizer-instances 2 --ddp-reduce-scatter-with-fp32-accumulation"
    changes = shrunk(text).changes
    assert "not checked: low precision (--ddp-reduce-scatter-with-fp32-accumulation)" in changes
    assert "one instance of the distributed optimizer (--num-distributed-optimizer-instances)" in changes
