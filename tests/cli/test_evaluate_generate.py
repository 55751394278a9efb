"""lancet evaluate and lancet generate on a checkpoint that two expert-parallel ranks wrote."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_lancet.errors import UsageError
from tests import data
from tests.cli.evil import calls, evil_archive
from tests.cli.loading import TOOLS, load_tool
from tests.ranks import launch
from tests.ranks.pretraining import EP2, SHORT_RUN, TINY_MODEL, WORKER

pytestmark = pytest.mark.distributed

NUM_ITERS, CONTEXT, VALID_WINDOWS, NUM_MOE_LAYERS = 10, 32, 32, 2
# With tied embeddings a model that has hardly learned repeats the last token.
DIVERSE = ["--untie-embeddings-and-output-weights", "--init-method-std", "0.1"]
PROMPT = "3 21 149"
# The log has seven digits; chunks and the number of ranks change the order of sums in fp32.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def trained(tmp_path_factory, token_data):
    """Folder of checkpoints, prefix of the validation data, and Megatron's validation loss on it."""
    return train(tmp_path_factory.mktemp("trained"), token_data)


def train(folder: Path, token_data: str, *more: str) -> tuple[Path, Path, float]:
    """Trains with some more flags."""
    valid = write_stream(folder / "valid_document", CONTEXT * VALID_WINDOWS + 1)
    flags = ["--train-data-path", token_data, "--valid-data-path", valid, "--train-iters", NUM_ITERS]
    flags += ["--eval-iters", VALID_WINDOWS // 16, "--save", folder / "checkpoints", "--save-interval", NUM_ITERS]
    arguments = [*TINY_MODEL, *SHORT_RUN, *EP2, *DIVERSE, "--lancet-num-chunks", "2", *flags, *more]
    split = arguments.index("--split")  # excludes data of its own for validation
    del arguments[split : split + 2]
    results = launch.run(WORKER, arguments, 2, folder / "run")
    launch.check(results)
    log = "\n".join(result.output for result in results)
    found = re.search(r"validation loss at iteration \d+ on validation set.*?lm loss value: (\S+)", log)
    assert found, log[-3000:]
    return folder / "checkpoints", valid, float(found[1])


def write_stream(prefix: Path, num_tokens: int) -> Path:
    """One document, like those of ``tests/data.py``."""
    random = np.random.default_rng(1)
    tokens = [1]
    while len(tokens) < num_tokens:
        tokens.append((7 * tokens[-1] + int(random.integers(5))) % (data.VOCAB_SIZE - 1))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.add_item(torch.tensor(tokens))
    builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture(scope="module")
def tool():
    return load_tool


@pytest.fixture
def written(tool, trained, tmp_path, capsys):
    """What lancet generate writes for some flags, on one rank; with ``shown``, what it printed."""

    def run(*flags):
        output = tmp_path / "generated.json"
        tool("generate").main(["--load", str(trained[0]), "--output", str(output), "--max-tokens", "20", *flags])
        return {**json.loads(output.read_text()), "shown": capsys.readouterr().out}

    return run


def test_evaluate_loss_equals_megatrons_validation(tool, trained, tmp_path, capsys):
    checkpoints, valid, expected = trained
    flags = ["--load", str(checkpoints), "--data", str(valid), "--output"]
    tool("evaluate").main([*flags, str(tmp_path / "one.json"), "--batch-size", "5"])
    launch.check(launch.run(TOOLS / "evaluate.py", [*flags, tmp_path / "two.json"], 2, tmp_path / "ranks"))
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert one["num_tokens"] == two["num_tokens"] == CONTEXT * VALID_WINDOWS
    assert one["loss"] == pytest.approx(expected, rel=TOLERANCE)
    assert two["loss"] == pytest.approx(one["loss"], rel=TOLERANCE)
    assert one["perplexity"] == pytest.approx(np.exp(one["loss"]))
    assert one["iteration"] == NUM_ITERS
    assert f"{one['loss']:.6f} nats per token" in capsys.readouterr().out


def test_replicas_change_no_loss(tool, trained, tmp_path):
    """A copied expert computes what the expert computes; a GEMM over another number of rows may round differently."""
    checkpoints, valid, _ = trained
    flags = ["--load", str(checkpoints), "--data", str(valid), "--output"]
    tool("evaluate").main([*flags, str(tmp_path / "one.json")])
    more = [tmp_path / "replicas.json", "--replicas", 2, "--batch-size", 4]
    results = launch.run(TOOLS / "evaluate.py", [*flags, *more], 2, tmp_path / "ranks")
    launch.check(results)
    one, replicas = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "replicas.json"))
    assert replicas["loss"] == pytest.approx(one["loss"], rel=TOLERANCE)
    assert replicas["replicas"] == 2
    assert replicas["before"]["sent_share"] > replicas["after"]["sent_share"] > 0
    assert replicas["before"]["most_over_mean"] > replicas["after"]["most_over_mean"] >= 1
    assert "2 in each layer, " in results[0].output
    with pytest.raises(UsageError, match=r"--replicas 2 is not possible: one rank holds all experts"):
        tool("evaluate").main([*flags[:-1], "--replicas", "2"])
    with pytest.raises(UsageError, match=r"--popularity has no effect without --replicas"):
        tool("evaluate").main([*flags[:-1], "--popularity", "load.json"])


def test_chunks_and_tiles_change_no_loss(tool, trained, tmp_path):
    """Rows travel in messages of ours: two layers, two chunks with a dispatch and a combine of two tiles each."""
    checkpoints, valid, expected = trained
    flags = ["--load", str(checkpoints), "--data", str(valid)]
    more = ["--batch-size", 4, "--chunks", 2, "--tiles", 2, "--output", tmp_path / "tiles.json"]
    results = launch.run(TOOLS / "evaluate.py", [*flags, *more], 2, tmp_path / "ranks")
    launch.check(results)
    found = json.loads((tmp_path / "tiles.json").read_text())
    assert found["loss"] == pytest.approx(expected, rel=TOLERANCE)
    num_batches = VALID_WINDOWS // (4 * 2)
    assert found["num_all_to_alls"] == num_batches * NUM_MOE_LAYERS * 2 * 2 * 2
    assert "tiles=2" in found["plan"]
    assert "  overlap       chunks=2" in results[0].output
    with pytest.raises(UsageError, match=r"--chunks 2 and --tiles 1 are not possible: one rank holds all experts"):
        tool("evaluate").main([*flags, "--chunks", "2", "--tiles", "1"])
    with pytest.raises(UsageError, match=r"--chunks 9 cuts a batch of 8 windows"):
        tool("evaluate").main([*flags, "--chunks", "9"])
    with pytest.raises(UsageError, match=r"--replicas runs Megatron's own layers"):
        tool("evaluate").main([*flags, "--replicas", "2", "--tiles", "1"])


def test_model_in_bf16_is_evaluated_in_chunks(token_data, tmp_path):
    """Megatron wraps such a model in Float16Module. Numbers in bf16 have three digits."""
    checkpoints, valid, expected = train(tmp_path, token_data, "--bf16")
    flags = ["--load", checkpoints, "--data", valid, "--batch-size", 4, "--chunks", 2, "--output"]
    launch.check(launch.run(TOOLS / "evaluate.py", [*flags, tmp_path / "chunks.json"], 2, tmp_path / "ranks"))
    found = json.loads((tmp_path / "chunks.json").read_text())
    assert found["loss"] == pytest.approx(expected, rel=2e-3)
    assert found["num_all_to_alls"] > 0


def test_routing_report_says_what_the_routers_chose(tool, trained, tmp_path, capsys):
    checkpoints, valid, _ = trained
    report, load = tmp_path / "report.json", tmp_path / "load.json"
    flags = ["--load", str(checkpoints), "--data", str(valid), "--batch-size", "4", "--json", str(report)]
    tool("plans/routing_report").main([*flags, "--expert-load", str(load)])
    shown, found = capsys.readouterr().out, json.loads(report.read_text())
    assert f"{CONTEXT * VALID_WINDOWS} tokens in {VALID_WINDOWS // 4} windows, 4 experts, 2 of a token" in shown
    first, second = found["layers"]
    assert found["num_top"] == 2
    assert first["path_table"] is None
    assert second["path_table"]["num_windows"] == second["last_window"]["num_windows"] == VALID_WINDOWS // 8
    assert 0 < second["path_table"]["mean_error"] < 0.25
    rows = [layer["rows"] for layer in json.loads(load.read_text())["layers"]]
    for layer, by_rank in zip((first, second), rows, strict=True):
        assert by_rank == [layer["popularity"]["counts"]]
        assert sum(by_rank[0]) == 2 * CONTEXT * VALID_WINDOWS
    tool("plans/routing_report").main(["--loads", str(load), str(load), "--top", "1"])
    assert "2 measured loads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], r"--load is missing: pass a checkpoint and a text, or --loads FILE"),
        (["--load", "checkpoints"], r"--data is missing"),
        (["--loads", "a.json", "--top", "2", "--max-tokens", "5"], r"--max-tokens has no effect with --loads"),
        (["--loads", "a.json"], r"pass --top N"),
        (["--loads", "/nowhere.json", "--top", "2"], r"/nowhere.json"),
    ],
)
def test_routing_report_refuses_what_says_nothing(tool, flags, message):
    with pytest.raises(UsageError, match=message) as refused:
        tool("plans/routing_report").main(flags)
    assert "\n" not in str(refused.value)


def test_evaluate_text_has_a_loss_per_byte_and_equals_its_tokens(tool, trained, tmp_path):
    """The last window is a part of one; the end of text in front makes every token of the text a predicted one."""
    checkpoints, valid, _ = trained
    tokens = np.fromfile(f"{valid}.bin", dtype=np.uint16)[:75]
    text = " ".join(map(str, tokens))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}) + "\n\n")
    (tmp_path / "text.txt").write_text(text)
    eod = data.VOCAB_SIZE - 1
    stream = tmp_path / "stream"
    builder = IndexedDatasetBuilder(f"{stream}.bin", dtype=np.uint16)
    builder.add_item(torch.tensor([eod, *tokens.tolist(), eod]))
    builder.end_document()
    builder.finalize(f"{stream}.idx")
    results = {}
    for name in ("text.jsonl", "text.txt", "stream"):
        output = tmp_path / "result.json"
        tool("evaluate").main(["--load", str(checkpoints), "--data", str(tmp_path / name), "--output", str(output)])
        results[name] = json.loads(output.read_text())
    assert results["text.jsonl"] == results["text.txt"]
    assert results["stream"]["loss"] == results["text.txt"]["loss"]
    assert results["stream"]["bits_per_byte"] is None
    total_bits = results["text.txt"]["loss"] * 76 / np.log(2)
    assert results["text.txt"]["bits_per_byte"] == pytest.approx(total_bits / len(text))


def test_greedy_generation_follows_the_model_on_any_ranks(written, trained, tmp_path):
    one = written("--greedy", "--prompt", PROMPT, "--ignore-end")
    output = tmp_path / "two.json"
    flags = ["--load", trained[0], "--output", output, "--max-tokens", 20, "--greedy", "--ignore-end"]
    results = launch.run(TOOLS / "generate.py", [*flags, "--prompt", PROMPT], 2, tmp_path / "ranks")
    launch.check(results)
    two = json.loads(output.read_text())
    assert two["tokens"] == one["tokens"] == likeliest(trained[0], one["tokens"])
    assert len(one["tokens"]) == 20
    assert len(set(one["tokens"])) > 3, "a text of one token would not show much"
    assert one["shown"] == PROMPT + one["text"] + "\n"
    assert one["text"] == "".join(f" {token}" for token in one["tokens"])
    assert PROMPT + two["text"] in results[0].output
    assert two["text"] not in results[1].output
    assert one["ended"] == "maximum of tokens"


def likeliest(checkpoints, tokens):
    """Returns the likeliest tokens after the prompt and each of ``tokens`` except the last, from Megatron's model.

    It runs one pass over the full text with the test's own mask: tokens generated one by one must equal the model's
    predictions for the finished text.
    """
    from megatron_lancet.inference.session import Session

    text = [*map(int, PROMPT.split()), *tokens]
    seen = torch.tensor([text[:-1]])
    positions = torch.arange(seen.shape[1])
    is_later = positions[None, :] > positions[:, None]
    with Session.open(checkpoints).model() as model, torch.no_grad():
        assert type(model.module).__module__ == "megatron.core.models.gpt.gpt_model"
        logits = model.module(seen, positions[None], is_later[None, None])
    return logits[0, -len(tokens) :, : data.VOCAB_SIZE].argmax(-1).tolist()


def test_generated_text_depends_on_the_seed_alone(trained):
    from megatron_lancet.inference.generate import generate
    from megatron_lancet.inference.sampling import Sampling
    from megatron_lancet.inference.session import Session

    session = Session.open(trained[0])
    with session.model() as model:

        def tokens(**sampling):
            return generate(model, session.tokenizer, PROMPT, Sampling(**sampling), max_tokens=6).tokens

        for how in ({"top_p": 0.9}, {"top_k": 40, "temperature": 1.5}, {}):
            assert tokens(**how, seed=7) == tokens(**how, seed=7) != tokens(**how, seed=8)
        greedy = tokens(temperature=0.0)
        assert tokens(top_k=1, seed=5) == tokens(top_p=1e-9, seed=5) == greedy


def test_generate_streams_tokens_and_stops_where_context_is_full(tool, trained, monkeypatch, tmp_path):
    shown: list[str] = []
    monkeypatch.setattr("sys.stdout", type("Terminal", (), {"write": shown.append, "flush": lambda: None}))
    (tmp_path / "prompt.txt").write_text(PROMPT)
    flags = ["--load", str(trained[0]), "--prompt-file", str(tmp_path / "prompt.txt"), "--greedy", "--ignore-end"]
    output = tmp_path / "generated.json"
    tool("generate").main([*flags, "--max-tokens", "1000", "--output", str(output)])
    result = json.loads(output.read_text())
    assert shown == [PROMPT, *(f" {token}" for token in result["tokens"]), "\n"]
    assert len(result["tokens"]) == CONTEXT - len(PROMPT.split())
    assert result["ended"] == "context full"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", ""], r"the prompt is empty"),
        (["--prompt", " ".join(["1"] * CONTEXT)], rf"has {CONTEXT} tokens; the model's context of {CONTEXT} has room"),
        (["--prompt", "500"], r"ids from 500 to 500; the vocabulary has 0 to 499"),
        (["--prompt", "word"], r"refuses the prompt"),
        (["--prompt-file", "/nowhere"], r"can't read /nowhere"),
        (["--prompt", "1", "--temperature", "-1"], r"--temperature expects .* at least 0, got -1"),
        (["--prompt", "1", "--temperature", "nan"], r"--temperature expects"),
        (["--prompt", "1", "--top-p", "0"], r"--top-p expects"),
        (["--prompt", "1", "--top-p", "0.5", "--top-k", "3"], r"exclude each other"),
        (["--prompt", "1", "--greedy", "--top-k", "3"], r"have no effect"),
        (["--prompt", "1", "--seed", "-1"], r"--seed expects"),
        (["--prompt", "1", "--load", "/nowhere"], r"there is no folder /nowhere"),
        (["--prompt", "1", "--step", "7"], r"no checkpoint .*iter_0000007; in .* there are: iter_00000"),
        (["--prompt", "1", "--output", "/nowhere/file"], r"output folder /nowhere does not exist"),
    ],
)
def test_impossible_arguments_are_refused_in_one_line(tool, trained, flags, message):
    with pytest.raises(UsageError, match=message) as refused:
        tool("generate").main(["--load", str(trained[0]), *flags])
    assert "\n" not in str(refused.value)


def test_evaluate_refuses_data_of_another_vocabulary(tool, trained, tmp_path):
    def evaluate(name, content):
        (tmp_path / name).write_text(content)
        tool("evaluate").main(["--load", str(trained[0]), "--data", str(tmp_path / name)])

    with pytest.raises(UsageError, match=r"ids from 1 to 500; the checkpoint's tokenizer has 0 to 499"):
        evaluate("large.txt", "1 500")
    with pytest.raises(UsageError, match=r"1 tokens; at least 2"):
        evaluate("empty.txt", "")
    with pytest.raises(UsageError, match=r"lines.jsonl, line 2: expected the key 'text'"):
        evaluate("lines.jsonl", '{"text": "1"}\n{"other": "2"}\n')
    with pytest.raises(UsageError, match=r"no dataset at .*nothing: .*nothing.idx is missing"):
        tool("evaluate").main(["--load", str(trained[0]), "--data", str(tmp_path / "nothing")])


def test_missing_or_other_tokenizer_is_refused(trained, tmp_path):
    from megatron_lancet.inference.checkpoint_reader import find_checkpoint, read_run
    from megatron_lancet.inference.load import check_ranks, tokenizer_of

    run = read_run(find_checkpoint(trained[0]))
    with pytest.raises(UsageError, match=r"4 experts .* can't be shared evenly by 3 ranks"):
        check_ranks(run, 3)
    run.arguments.vocab_size = 700
    with pytest.raises(UsageError, match=r"the tokenizer has 700 ids, 768 when padded .* trained with 512"):
        tokenizer_of(run, None)
    run.arguments.tokenizer_type = "SentencePieceTokenizer"
    with pytest.raises(UsageError, match=r"tokenizer's file is missing: .*iter_.* names None"):
        tokenizer_of(run, None)
    (tmp_path / "garbage.model").write_bytes(b"garbage")
    with pytest.raises(UsageError, match=r"garbage.model is not a readable SentencePiece model"):
        tokenizer_of(run, tmp_path / "garbage.model")


class TestDamagedCheckpoints:
    @pytest.fixture
    def copy(self, trained, tmp_path):
        shutil.copytree(trained[0], tmp_path / "copy")
        return tmp_path / "copy"

    def refusal(self, tool, copy):
        with pytest.raises(UsageError) as refused:
            tool("generate").main(["--load", str(copy), "--prompt", "1"])
        return str(refused.value)

    def test_cut_or_missing_parts_are_refused(self, tool, copy):
        part = next(copy.glob("iter_*/__1_0.distcp"))
        part.write_bytes(part.read_bytes()[:-100])
        assert re.search(r"is incomplete: __1_0.distcp is truncated: \d+ bytes of \d+", self.refusal(tool, copy))
        part.unlink()
        assert "is incomplete: __1_0.distcp is missing" in self.refusal(tool, copy)

    def test_damaged_metadata_is_refused(self, tool, copy):
        index = next(copy.glob("iter_*/.metadata"))
        whole = index.read_bytes()
        for damaged in (b"", b"\xff" * 50, whole[: len(whole) // 2]):
            index.write_bytes(damaged)
            assert ".metadata is damaged" in self.refusal(tool, copy)
        index.unlink()
        assert "no complete distributed checkpoint" in self.refusal(tool, copy)

    def test_damaged_tracker_is_refused(self, tool, copy):
        tracker = copy / "latest_checkpointed_iteration.txt"
        for content, message in (("x", "must hold the number of a step"), ("99", "there is no checkpoint")):
            tracker.write_text(content)
            assert message in self.refusal(tool, copy)
        tracker.unlink()
        assert "latest_checkpointed_iteration.txt is missing" in self.refusal(tool, copy)

    def test_code_in_the_metadata_does_not_run(self, tool, copy, tmp_path):
        """A pickle that would write a file: ``(lambda: pathlib.Path.touch(victim))()``, spelled as opcodes."""
        victim = tmp_path / "ran"
        next(copy.glob("iter_*/.metadata")).write_bytes(b"cpathlib\nPath.touch\n" + calls(victim))
        assert "names pathlib.Path.touch, which does not belong in a checkpoint's description" in self.refusal(
            tool, copy
        )
        next(copy.glob("iter_*/.metadata")).write_bytes(b"cos\nsystem\n(Vtouch " + str(victim).encode() + b"\ntR.")
        assert "names os.system" in self.refusal(tool, copy)
        assert not victim.exists()

    def test_code_beside_the_weights_does_not_run(self, tool, copy, tmp_path, monkeypatch):
        """In the place of the run's arguments."""
        from megatron_lancet.checkpoint.index import read_index

        victim = tmp_path / "ran"
        index = read_index(next(copy.glob("iter_*")))
        part = next(part for part in index.parts if part.key.startswith("common_state"))
        path = next(copy.glob("iter_*")) / part.file
        content = bytearray(path.read_bytes())
        evil = evil_archive(victim)[: part.num_bytes].ljust(part.num_bytes, b"\0")
        content[part.offset : part.offset + part.num_bytes] = evil
        path.write_bytes(bytes(content))
        assert "restricted reader refuses" in self.refusal(tool, copy)
        assert not victim.exists()


def test_several_ranks_share_no_standard_input(tool, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="standard input reaches only one of several ranks: pass --prompt"):
        tool("generate").main(["--load", str(tmp_path)])
