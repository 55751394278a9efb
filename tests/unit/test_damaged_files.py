"""Random bytes and mutated files, wherever a file of a user's is read: a valid result, or one message with its name.

A crash of the process would end the test run.
"""

import argparse
import io
import json
import re
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from benchmarks.demo.training_log.train_log import RunLog
from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.cli.planning import load_plan, load_profile
from megatron_lancet.data.encode import (
    EncodeJob,
    TokenizerSettings,
    build_tokenizer,
    encode_batch,
)
from megatron_lancet.data.indexed import check_dataset
from megatron_lancet.data.jsonl import iter_line_batches
from megatron_lancet.errors import UsageError
from megatron_lancet.features.tuning.tuned_plan import TunedPlan
from megatron_lancet.files.reader import RecordError
from megatron_lancet.inference.checkpoint_reader import find_checkpoint, read_run
from megatron_lancet.inference.evaluate import read_stream
from megatron_lancet.lab.views.trace_file import read_trace, write_trace
from megatron_lancet.planning.plan_file import PlanFile, Source, made_for
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.profiler import cache
from tests.cli.loading import load_tool
from tests.damage import leaves, replaced
from tests.draws import examples
from tests.unit.report import steps

pytestmark = pytest.mark.slow

STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.sampled_from([0, -1, 2**31, 2**63, 10**400, 1e308, float("nan"), float("inf")]),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


def fuzzed(num_cases):
    return examples(num_cases, allowed=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large])


@st.composite
def damaged_bytes(draw, good: bytes, whole_chance: int = 6):
    """Now and then random bytes; else the file with bytes changed, taken out, put in, doubled, or its end lost."""
    if draw(st.integers(0, whole_chance)) == 0:
        return draw(st.binary(max_size=200))
    content = bytearray(good)
    for _ in range(draw(st.sampled_from([1, 1, 2, 3, 10]))):
        place = draw(st.integers(0, max(0, len(content) - 1)))
        kind = draw(st.sampled_from(["flip", "set", "cut", "insert", "end", "double"]))
        if not content:
            break
        if kind == "flip":
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set":
            content[place] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, ord("-"), ord("9"), ord('"')]))
        elif kind == "cut":
            del content[place : place + draw(st.integers(1, 64))]
        elif kind == "insert":
            content[place:place] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "end":
            del content[place:]
        else:
            content[place:place] = content[place : place + draw(st.integers(1, 64))]
    return bytes(content)


@st.composite
def damaged_json(draw, good: bytes):
    """Damaged bytes, or a value somewhere replaced by a strange one."""
    if draw(st.booleans()):
        return draw(damaged_bytes(good))
    value = json.loads(good)
    for _ in range(draw(st.integers(1, 3))):
        places = leaves(value)
        place = draw(st.sampled_from(places)) if places else ()
        depth = draw(st.integers(0, len(place))) if draw(st.integers(0, 3)) == 0 else len(place)
        value = replaced(value, place[:depth], draw(STRANGE))
    return json.dumps(value).encode()


def refused_or_fine(path, read):
    """Run ``read``; what a user may see is one message that names the file."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            read()
        except (UsageError, RecordError) as error:
            message = str(error)
        else:
            return
    assert Path(path).name in message, message
    assert len(message) < 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


@pytest.fixture(scope="module")
def profile():
    return synthetic_profile(Machine())


def test_damaged_plan_files_are_refused_or_read(folder, profile):
    planned = make_plan(profile)
    path = folder / "some_plan.json"
    good = PlanFile(
        plan=planned.alternatives[0].plan,
        made_for=made_for(profile.model),
        source=Source("made up", "cpu", {"torch": "2"}),
    ).to_json()
    main = load_tool("plans/explain_plan").main

    @fuzzed(350)
    @given(damaged_json(good.encode()))
    def check(content):
        path.write_bytes(content)
        refused_or_fine(path, lambda: main([str(path)]))
        refused_or_fine(path, lambda: load_plan(path))

    check()


def test_damaged_profiles_are_refused_or_read(folder, profile):
    path = folder / "some_profile.json"

    @fuzzed(300)
    @given(damaged_json(profile.to_json().encode()))
    def check(content):
        path.write_bytes(content)
        refused_or_fine(path, lambda: load_profile(path))

    check()


def test_damaged_kept_profiles_are_refused_or_read(folder, profile):
    key = cache.ProfileKey.of(profile)
    path = cache.keep(folder / "cache", profile, key.plans)
    good = path.read_bytes()

    @fuzzed(150)
    @given(damaged_json(good))
    def check(content):
        path.write_bytes(content)
        refused_or_fine(path, lambda: cache.load(folder / "cache", key))

    check()


def test_damaged_trace_files_are_refused_or_read(folder):
    path = folder / "some_trace.json"
    write_trace(steps.record(num_layers=2), path)
    good = path.read_bytes()
    main = load_tool("traces/show_timeline").main

    @fuzzed(250)
    @given(damaged_json(good))
    def read(content):
        path.write_bytes(content)
        refused_or_fine(path, lambda: read_trace(path))

    @fuzzed(20)
    @given(damaged_json(good))
    def show(content):
        path.write_bytes(content)
        refused_or_fine(path, lambda: main([str(path)]))

    read()
    show()


def test_damaged_tuned_plans_in_checkpoints_are_refused_or_read():
    from tests.features.tuning.test_tuned_plan import TUNED

    @fuzzed(150)
    @given(damaged_json(TUNED.to_json().encode()))
    def check(content):
        refused_or_fine("some", lambda: TunedPlan.from_json(content.decode(errors="replace"), "some"))

    check()


CORPUS = "\n".join(
    json.dumps({"text": text, "n": 1}) for text in ("def f():\n\treturn 1", "é 漢字 😀", "", "a b")
).encode()


def test_damaged_corpora_are_refused_or_read(folder, tokenizer_file):
    path, settings_ = folder / "some_corpus.jsonl", TokenizerSettings("SentencePieceTokenizer", str(tokenizer_file))
    job = EncodeJob(path, ("text",), settings_, append_eod=True)

    @fuzzed(300)
    @given(damaged_bytes(CORPUS))
    def check(content):
        path.write_bytes(content)
        refused_or_fine(path, lambda: [encode_batch(job, batch) for batch in iter_line_batches(path, 64)])

    check()


def test_damaged_jsonl_texts_are_refused_or_read(folder, tokenizer_file):
    path = folder / "some_text.txt"
    tokenizer = build_tokenizer(TokenizerSettings("SentencePieceTokenizer", str(tokenizer_file)))

    @fuzzed(150)
    @given(damaged_bytes("def f():\n\treturn 1  # é 漢字 😀\n".encode()))
    def check(content):
        path.write_bytes(content)
        refused_or_fine(path, lambda: read_stream(str(path), tokenizer))

    check()


@pytest.fixture(scope="module")
def tokenizer_file(folder):
    """A real model, as small as lancet data tokenizer makes them."""
    path = folder / "good.model"
    texts = [f"def f{i}(x):  return x + {i}  # some text {'abcdefghij'[i % 10]} é" for i in range(200)]
    content = load_tool("data/train_tokenizer").train_model(texts, 400)
    path.write_bytes(content)
    return path


def test_damaged_tokenizers_are_refused_or_read(folder, tokenizer_file):
    good = tokenizer_file.read_bytes()
    path = folder / "some.model"

    def use():
        build_tokenizer.cache_clear()
        tokenizer = build_tokenizer(TokenizerSettings("SentencePieceTokenizer", str(path)))
        ids = tokenizer.tokenize("def f(x):\n\treturn é x  1234")
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        tokenizer.detokenize(ids)

    @fuzzed(250)
    @given(damaged_bytes(good))
    def check(content):
        path.write_bytes(content)
        refused_or_fine(path, use)

    check()
    build_tokenizer.cache_clear()


@st.composite
def damaged_index(draw, good: bytes):
    """Also whole numbers of it replaced: counts, lengths, offsets."""
    if draw(st.booleans()):
        return draw(damaged_bytes(good))
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.sampled_from([4, 8]))
        start = draw(st.sampled_from([9, 18, 26])) if draw(st.booleans()) else draw(st.integers(0, len(good) - size))
        value = draw(st.sampled_from([0, 1, 3, 255, 2**31 - 1, 2**31, 2**62, 2**63 - 1]) | st.integers(0, 2**63 - 1))
        content[start : start + size] = value.to_bytes(8, "little")[:size]
    return bytes(content)


def test_damaged_datasets_are_refused_or_read(folder):
    prefix = folder / "some_document"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in (5, 1, 12):
        builder.add_item(torch.arange(length))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    good_idx, good_bin = idx.read_bytes(), bin_.read_bytes()

    def use():
        found = check_dataset(str(prefix))
        dataset = IndexedDataset(str(prefix), mmap=found.num_tokens > 0)
        assert sum(len(dataset[i]) for i in range(len(dataset))) == found.num_tokens
        if found.in_order:
            assert len(found.tokens()) == found.num_tokens

    @fuzzed(450)
    @given(damaged_index(good_idx), st.just(good_bin) | damaged_bytes(good_bin))
    def check(index, tokens):
        idx.write_bytes(index)
        bin_.write_bytes(tokens)
        refused_or_fine(prefix, use)

    check()


def make_checkpoint(checkpoint):
    """What Megatron writes, without optimizer; the content of its files by name."""
    state = {
        "common_state/shard_0_1": [{"args": argparse.Namespace(num_layers=2, bf16=False), "iteration": 1}],
        "embedding.word_embeddings.weight": torch.zeros(8, 4),
        "decoder.layers.mlp.router.weight": torch.zeros(2, 4),
    }
    dcp.save(state, checkpoint_id=checkpoint, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


def test_damaged_checkpoints_are_refused_or_read(folder):
    checkpoint = folder / "checkpoints" / "iter_0000001"
    good = make_checkpoint(checkpoint)
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    files = sorted(good)

    @fuzzed(250)
    @given(st.data())
    def check(data):
        name = data.draw(st.sampled_from(files))
        (checkpoint / name).write_bytes(data.draw(damaged_bytes(good[name])))
        refused_or_fine(checkpoint, lambda: read_run(find_checkpoint(folder / "checkpoints")))
        (checkpoint / name).write_bytes(good[name])

    read_run(find_checkpoint(folder / "checkpoints"))
    check()


def test_damaged_train_logs_are_refused_or_read():
    line = (
        " [2026-01-01 00:00:00.000000] iteration        1/     500 | consumed samples:           16 | elapsed time per "
        "iteration (ms): 984.2 | learning rate: 1.500000E-03 | lm loss: 7.6E+00 |\n validation loss at iteration 500 "
        "on validation set | lm loss value: 3.7E+00 | lm loss PPL: 4.1E+01 | \n"
    )

    @fuzzed(150)
    @given(damaged_bytes(line.encode()))
    def check(content):
        log = RunLog()
        for text in content.decode(errors="replace").splitlines():
            log.feed(text)

    check()


def test_number_of_damaged_files_is_large_enough():
    """2,000 were asked for; whichever of these tests a run picks, the file has them."""
    assert sum(map(int, re.findall(r"^    @fuzzed\((\d+)\)$", Path(__file__).read_text(), re.MULTILINE))) >= 2000
