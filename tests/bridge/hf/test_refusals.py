"""What is refused before a run starts, each in one line; and a folder that can't be written."""

import importlib.util
import json
import os
import sys
from types import SimpleNamespace

import pytest

from megatron_lancet.errors import CheckpointError, UsageError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.bridge") is None, reason="needs Megatron-Bridge: make test-bridge"
)
RUN = (
    "--seq-length 32 --micro-batch-size 2 --lr 1e-3 --eval-interval 1000 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --lancet-plan off"
).split()
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "rope_theta": 1e6,
}


@pytest.fixture(scope="module", autouse=True)
def bridge():
    from tests.bridge import preload  # noqa: F401


def folder_of(config, place):
    """A model without a tensor: nothing reads one before the model is built."""
    from safetensors.torch import save_file

    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    save_file({}, place / "model.safetensors")
    return place


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return folder_of(QWEN3, tmp_path_factory.mktemp("models") / "qwen3")


def parse(monkeypatch, *words):
    """The arguments of a command line that our own checks accept."""
    from megatron_lancet.registry import features
    from megatron_lancet.training.arguments import check_settings
    from megatron_lancet.training.arguments import parse as parse_command_line

    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py", *RUN, *map(str, words)])
    monkeypatch.setattr(os, "environ", {**os.environ, "WORLD_SIZE": "1", "RANK": "0"})
    args, config = parse_command_line(features())
    check_settings(args, config)
    return args


def test_arguments_are_those_of_the_folder(monkeypatch, qwen3):
    args = parse(monkeypatch, "--lancet-from-hf", qwen3, "--num-layers", 4)
    assert (args.num_layers, args.num_experts, args.rotary_base, args.padded_vocab_size) == (4, 8, 1_000_000, 256)
    assert (args.normalization, args.swiglu, args.num_query_groups, args.qk_layernorm) == ("RMSNorm", True, 2, True)
    assert args.untie_embeddings_and_output_weights
    assert args.tokenizer_type == "NullTokenizer"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--num-layers", 3), r"--num-layers: expected 4, as .*config\.json says, found 3\. Drop the flag"),
        (("--rotary-base", 10000), r"--rotary-base: expected 1000000, .* found 10000\."),
        (("--moe-router-topk", 4), r"--moe-router-topk: expected 2, .* found 4\."),
        (("--moe-router-num-groups", 2), r"--moe-router-num-groups: expected None, .* found 2\."),
        (("--multi-latent-attention",), r"--multi-latent-attention: expected False, .* found True\."),
        (("--use-megatron-fsdp",), r"--lancet-from-hf does not work with --use-megatron-fsdp"),
        (("--tensor-model-parallel-size", 3), r"expected a tensor parallel size that divides its 256 tokens, found 3"),
    ],
)
def test_contradiction_is_refused(monkeypatch, qwen3, words, message):
    with pytest.raises(UsageError, match=message) as refusal:
        parse(monkeypatch, "--lancet-from-hf", qwen3, *words)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "Bridge does not know its model. Take one of "),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Bridge does not know its model. Take one of "),
        ({"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"}, "OlmoeForCausalLM has layers of its own"),
        (
            {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
            "GptOssForCausalLM has positions of kind yarn",
        ),
        ({"use_sliding_window": True, "sliding_window": 16}, "has attention within a window"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "has positions of kind linear"),
    ],
)
def test_other_model_is_refused(monkeypatch, tmp_path, changes, message):
    folder = folder_of(QWEN3 | changes, tmp_path / "model")
    with pytest.raises(UsageError, match=message) as refusal:
        parse(monkeypatch, "--lancet-from-hf", folder)
    assert "\n" not in str(refusal.value)


def test_folder_without_a_model_is_refused(monkeypatch, tmp_path, qwen3):
    with pytest.raises(UsageError, match=r"expects a folder, found none at .*none\. Download the model first, "):
        parse(monkeypatch, "--lancet-from-hf", tmp_path / "none")
    with pytest.raises(UsageError, match=r"expected config\.json in it, found none"):
        parse(monkeypatch, "--lancet-from-hf", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"expected \*\.safetensors in it, found none"):
        parse(monkeypatch, "--lancet-from-hf", tmp_path)
    with pytest.raises(UsageError, match="--lancet-save-hf expects --lancet-from-hf, whose configuration"):
        parse(monkeypatch, "--lancet-save-hf", tmp_path)


def test_configuration_without_an_argument_is_refused(qwen3):
    from megatron_lancet.features.hugging_face.model import check_built
    from megatron_lancet.features.hugging_face.source import source_of

    source = source_of(str(qwen3))
    names = vars(source.provider)
    check_built(source, SimpleNamespace(**names))
    with pytest.raises(UsageError, match=r"expected moe_router_topk 2, which no argument .* sets; found 4"):
        check_built(source, SimpleNamespace(**names | {"moe_router_topk": 4}))


def test_folder_that_cannot_be_written_is_refused(tmp_path):
    from megatron_lancet.features.hugging_face.folders import check_writable

    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--lancet-save-hf .*: expected a folder that can be written, found .*"):
        check_writable(tmp_path / "file" / "below")
    check_writable(tmp_path / "new")
    assert not any((tmp_path / "new").iterdir())


@pytest.fixture
def saved(monkeypatch, qwen3):
    """Saves tensors on the only rank; returns how many were taken from the model."""
    import torch

    from megatron_lancet.features.hugging_face import folders
    from megatron_lancet.features.hugging_face.source import source_of

    def save(target, expected=("a", "b", "c"), shard_bytes=20):
        taken = []

        def stream(source, stages):
            for number, name in enumerate("abc"):
                taken.append(name)
                yield name, torch.full((4,), float(number), dtype=torch.bfloat16)

        monkeypatch.setattr(folders, "stream", stream)
        monkeypatch.setattr(folders, "expected_names", lambda source: set(expected))
        monkeypatch.setattr(folders, "_SHARD_BYTES", shard_bytes)
        monkeypatch.setattr(folders.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(folders, "from_rank_0", lambda ask: ask())
        try:
            folders.save(source_of(str(qwen3)), [], target)
        finally:
            assert taken == ["a", "b", "c"]  # the other ranks would wait for what is not taken

    return save


def test_large_model_has_several_files(saved, tmp_path):
    from safetensors.torch import load_file

    saved(tmp_path / "model")
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {"metadata": {"total_size": 24}, "weight_map": {"a": first, "b": first, "c": second}}
    assert load_file(tmp_path / "model" / second)["c"].tolist() == [2.0] * 4
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_failed_save_keeps_the_old_folder(saved, tmp_path):
    target = tmp_path / "model"
    saved(target, shard_bytes=1000)
    (target / "old").write_text("")
    with pytest.raises(CheckpointError, match=r"model could not be written: Bridge did not export d\. The training's"):
        saved(target, expected="abcd")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "incomplete_model").write_text("")
    with pytest.raises(CheckpointError, match=r"could not be written: .*File exists"):
        saved(target)
    assert (target / "old").exists()
    (tmp_path / "incomplete_model").unlink()
    saved(target, shard_bytes=1000)
    assert not (target / "old").exists()
