"""Faults of the command line that need no second argument to be seen: each one message."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lancet import __version__
from megatron_lancet.config import OWN_SPEC, AttentionChoice, LancetConfig, PlanChoice
from megatron_lancet.data import hugging_face
from megatron_lancet.errors import UsageError
from megatron_lancet.features.comm_priority.feature import CommPriorityFlags
from megatron_lancet.features.ep_resize.feature import EpResizeFlags
from megatron_lancet.features.pairing.feature import PairingChoice, PairingFlags
from megatron_lancet.features.row_bound.feature import RowBoundFlags, RowLimitChoice
from megatron_lancet.features.tiles.feature import TilesChoice, TilesFlags
from megatron_lancet.features.tuning.flags import CacheChoice, TuningFlags
from megatron_lancet.flags import flags_of
from megatron_lancet.lab.dry_run.cluster import has_package
from megatron_lancet.registry import features
from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange
from megatron_lancet.schedule.reductions import CommPriority
from megatron_lancet.training import arguments


@pytest.fixture
def command_line(monkeypatch):
    def set_to(*words: object):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py", *map(str, words)])

    return set_to


def test_megatrons_and_our_flags_are_parsed(command_line):
    wishes = ["--lancet-num-chunks", 3, "--lancet-dw-policy", "none", "--lancet-report", "out"]
    command_line("--num-layers", 4, *wishes)
    args, config = arguments.parse()
    assert args.num_layers == 4
    assert config == LancetConfig(PlanChoice.AUTO, 3, dw_policy=DwPolicy.NONE, report_dir=Path("out"))
    command_line("--lancet-dw-memory-mb", 0.5)
    assert arguments.parse()[1] == LancetConfig(dw_memory_mb=0.5)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--lancet-plan auto", {"plan": PlanChoice.AUTO}),
        ("--lancet-plan off", {"plan": PlanChoice.OFF}),
        (f"--lancet-plan {__file__}", {"plan": Path(__file__)}),
        ("--lancet-num-chunks 3", {"num_chunks": 3}),
        ("--lancet-chunk-dim auto", {"chunk_dim": None}),
        ("--lancet-chunk-dim batch", {"chunk_dim": ChunkDim.BATCH}),
        ("--lancet-chunk-dim sequence", {"chunk_dim": ChunkDim.SEQUENCE}),
        ("--lancet-range experts", {"range": OverlapRange.EXPERTS}),
        ("--lancet-range gate", {"range": OverlapRange.GATE}),
        ("--lancet-range stack", {"range": OverlapRange.STACK}),
        ("--lancet-attention auto", {"attention": AttentionChoice.AUTO}),
        ("--lancet-attention stock", {"attention": AttentionChoice.STOCK}),
        ("--lancet-attention sdpa", {"attention": AttentionChoice.SDPA}),
        ("--lancet-dw-policy fill", {"dw_policy": DwPolicy.FILL}),
        ("--lancet-dw-policy none", {"dw_policy": DwPolicy.NONE}),
        ("--lancet-dw-memory-mb 0.5", {"dw_memory_mb": 0.5}),
        ("--lancet-report out", {"report_dir": Path("out")}),
        *((f"--lancet-dispatch {choice}", {"dispatch": choice}) for choice in Dispatch.known().values()),
        ("--lancet-dispatch auto", {}),
    ],
)
def test_each_lancet_flag_sets_its_field_of_the_config(words, expected):
    plain = arguments.config_from_words([])
    assert arguments.config_from_words(words.split()) == replace(plain, **expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--lancet-comm-priority off", CommPriorityFlags(CommPriority.OFF)),
        ("--lancet-comm-priority all-to-all-first", CommPriorityFlags(CommPriority.ALL_TO_ALL_FIRST)),
        ("--lancet-grad-chunk-mb 2.5", CommPriorityFlags(grad_chunk_mb=2.5)),
        ("--lancet-max-expert-rows auto", RowBoundFlags(RowLimitChoice.AUTO)),
        ("--lancet-max-expert-rows 4096", RowBoundFlags(4096)),
        ("--lancet-separate-expert-grads", EpResizeFlags(separate_expert_grads=True)),
        *((f"--lancet-pairing {choice}", PairingFlags(choice)) for choice in PairingChoice),
        *((f"--lancet-tiles {number}", TilesFlags(number)) for number in (0, 4)),
        ("--lancet-tune-steps 3", TuningFlags(tune_steps=3)),
        ("--lancet-cache off", TuningFlags(cache=CacheChoice.OFF)),
        ("--lancet-cache here", TuningFlags(cache=Path("here"))),
        ("--lancet-profile file.json", TuningFlags(profile=Path("file.json"))),
        ("--lancet-pairing auto", PairingFlags()),
        ("--lancet-tiles auto", TilesFlags(TilesChoice.AUTO)),
        ("", TilesFlags(None)),
    ],
)
def test_each_flag_of_a_feature_sets_its_field(words, expected):
    found = arguments.config_from_words(words.split(), features())
    assert found.of(type(expected)) == expected


def test_help_has_megatrons_flags_and_ours(command_line, capsys):
    command_line("--help")
    with pytest.raises(SystemExit, match=r"^0$"):
        arguments.parse()
    shown = capsys.readouterr().out
    assert "--lancet-num-chunks K" in shown
    assert "--num-experts NUM_EXPERTS" in shown


def test_parsed_defaults_are_the_configurations(command_line):
    command_line()
    assert arguments.parse()[1] == LancetConfig()
    assert arguments.config_from_words([]) == LancetConfig()


def test_parsed_flags_are_plain_values(command_line):
    command_line()
    args, _ = arguments.parse(features())
    kinds = [LancetConfig, *(feature.flags for feature in features() if feature.flags)]
    names = [name for kind in kinds for name, *_ in flags_of(kind)]
    values = [getattr(args, name.removeprefix("--").replace("-", "_")) for name in names]
    assert {type(value) for value in values} <= {str, int, float, bool, type(None)}
    assert "auto" in values


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (LancetConfig, {"num_chunks": 0}, r"--lancet-num-chunks expects at least 1, got 0\.$"),
        (
            CommPriorityFlags,
            {"grad_chunk_mb": -3.0},
            r"--lancet-grad-chunk-mb expects .* above 0, got -3\. To reduce whole buckets",
        ),
    ],
)
def test_ranges_are_checked_where_a_configuration_is_made(kind, values, message):
    with pytest.raises(UsageError, match=message):
        kind(**values)


def test_version_flag_prints_the_version(command_line, capsys):
    command_line("--version")
    with pytest.raises(SystemExit, match=r"^0$"):
        arguments.parse()
    assert capsys.readouterr().out == f"megatron-lancet {__version__}\n"


def test_help_of_our_flags_leaves_megatrons_out(command_line, capsys):
    command_line("--lancet-help")
    with pytest.raises(SystemExit, match="0"):
        arguments.parse(features())
    printed = capsys.readouterr().out
    assert {"--lancet-report", "--lancet-verbose", "--lancet-tiles"} <= set(printed.split())
    assert "--num-layers" not in printed.split()


def test_profile_cache_defaults_to_the_users_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert TuningFlags().cache_dir == Path("/cache/megatron-lancet")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert TuningFlags().cache_dir == Path("/home/somebody/.cache/megatron-lancet")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lancet-num-chunk", 2], "unrecognized arguments: --lancet-num-chunk 2.*did you mean --lancet-num-chunks"),
        (["--num-layer", 2], "did you mean --num-layers"),
        (["--no-such-thing"], "unrecognized arguments: --no-such-thing"),
        (["--num-layers", "two"], "invalid int value: 'two'"),
        (["--lancet-num-chunks", 0], "expects at least 1, got 0"),
        (["--lancet-plan", "fast"], "there is no file fast"),
        (["--lancet-dw-policy", "all"], "invalid choice: 'all'"),
        (["--lancet-chunk-dim", "hidden"], "--lancet-chunk-dim: invalid choice: 'hidden'.*sequence"),
        (["--lancet-range", "model"], "--lancet-range: invalid choice: 'model'.*stack"),
        (["--lancet-dw-memory-mb", 0], "expects a number of MB above 0, got 0.*--lancet-dw-policy none"),
        (["--lancet-dw-memory-mb", "nan"], "got nan"),
        (["--lancet-tune-steps", 0], "--lancet-tune-steps expects at least 1, got 0"),
        (["--lancet-dw-memory-mb", "inf"], "got inf"),
        (["--lancet-grad-chunk-mb", 0], "--lancet-grad-chunk-mb expects a number of MB above 0, got 0"),
        (["--lancet-grad-chunk-mb", -3], "got -3"),
        (["--lancet-grad-chunk-mb", "nan"], "got nan"),
        (["--lancet-comm-priority", "first"], "invalid choice: 'first'.*all-to-all-first"),
        (["--lancet-dw-memory-mb", "64MB"], "invalid float value: '64MB'"),
        (["--lancet-pairing", "yes"], "--lancet-pairing: invalid choice: 'yes'"),
        (["--lancet-dispatch", "once"], "--lancet-dispatch: invalid choice: 'once'"),
        (["--lancet-tiles", "many"], "--lancet-tiles expects auto, or a number of tiles"),
        *((["--lancet-max-expert-rows", t], f"or a number of rows above 0, got {t}") for t in ("0", "1.5", "all")),
        (["--lancet-max-expert-rows=-4"], "expects auto, or a number of rows above 0, got -4"),
        (["--lancet-comm-sms", 0], "--lancet-comm-sms expects at least 1, got 0"),
        (["--lancet-ranks-per-node", 0], r"-ranks-per-node expects at least 1, got 0\. Defaults to"),
    ],
)
def test_faulty_arguments_are_refused(command_line, words, message):
    command_line(*words)
    with pytest.raises(UsageError, match=message) as refusal:
        arguments.parse(features())
    assert len(str(refusal.value)) < 300  # not the usage text


def parsed(command_line, *words: object, world_size: int = 2):
    command_line("--mock-data", "--eval-interval", 10, *words)
    args, _ = arguments.parse()
    args.world_size = world_size
    return args


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-experts", 3, "--expert-model-parallel-size", 2], "got 3 experts on 2 expert-parallel ranks"),
        (["--expert-model-parallel-size", 2], "pass --num-experts"),
        (["--tensor-model-parallel-size", 3], "= 3; there are 2"),
        (["--num-experts", 8, "--expert-model-parallel-size", 4], "must divide the ranks of a pipeline stage"),
        (["--num-experts", 4], "--disable-bias-linear"),
        (["--sft"], "does not support --sft "),
        (["--hybrid-override-pattern", "*E"], "builds layers of Transformer Engine only"),
        (["--logits-load-dir", "logits"], "does not support --logits-load-dir "),
        (["--spec", *OWN_SPEC], "is for Megatron's own pretrain_gpt.py"),
        (["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "/no/such.model"], "no such file"),
        (["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", __file__], "takes a folder, found the file"),
        (["--micro-batch-size", 1], "--hidden-size is missing"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(command_line, words, message):
    args = parsed(command_line, "--transformer-impl", "local", *words)
    with pytest.raises(UsageError, match=message):
        arguments.validate(args, LancetConfig())


def test_missing_package_of_a_tokenizer_is_refused(command_line, monkeypatch, tmp_path):
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
    kernels = "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm"
    flags = [
        *f"{sizes} {kernels} --micro-batch-size 1 --train-iters 1 --lr 1e-3".split(),
        "--tokenizer-model",
        tmp_path,
    ]
    args = parsed(command_line, *flags, "--tokenizer-type", "HuggingFaceTokenizer", world_size=1)
    monkeypatch.setattr(hugging_face, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^--tokenizer-type .* needs .*: pip install tokenizers transformers$"):
        arguments.validate(args, LancetConfig())


def test_missing_data_is_refused(command_line, tmp_path):
    prefix = tmp_path / "text_document"
    Path(f"{prefix}.idx").touch()
    command_line("--eval-interval", 10, "--data-path", prefix)
    with pytest.raises(UsageError, match=rf"data file not found: {prefix}\.bin"):
        arguments.validate(*arguments.parse())
    command_line("--eval-interval", 10)
    with pytest.raises(UsageError, match="no data: pass --data-path"):
        arguments.validate(*arguments.parse())


def test_missing_eval_interval_is_refused(command_line):
    command_line("--mock-data")
    with pytest.raises(UsageError, match="--eval-interval is missing"):
        arguments.validate(*arguments.parse())


@pytest.mark.skipif(has_package("transformer_engine"), reason="Transformer Engine is installed")
def test_missing_transformer_engine_is_refused(command_line, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
    args = parsed(command_line, *model.split(), "--micro-batch-size", 1, "--lr", 1, "--train-iters", 1, world_size=1)
    with pytest.raises(UsageError, match=r"needs Transformer Engine, .*--transformer-impl local"):
        arguments.validate(args, LancetConfig())


def test_megatrons_assert_without_message_shows_its_condition():
    def check(size):
        assert size > 3

    with pytest.raises(AssertionError) as failure:
        check(2)
    failure.value.args = ()
    assert "assert size > 3" in arguments.reason_of(failure.value)


def test_flags_for_another_programs_command_line():
    words = ["--lancet-num-chunks", "3", "--lancet-cache", "off", "--lancet-comm-priority", "all-to-all-first"]
    config = arguments.config_from_words(words, features())
    assert (config.num_chunks, config.of(TuningFlags).cache) == (3, CacheChoice.OFF)
    assert config.of(CommPriorityFlags).comm_priority is CommPriority.ALL_TO_ALL_FIRST
    with pytest.raises(UsageError, match=r"--lancet-num-chunk 3.*did you mean --lancet-num-chunks"):
        arguments.config_from_words(["--lancet-num-chunk", "3"])
    with pytest.raises(UsageError, match="expects at least 1"):
        arguments.config_from_words(["--lancet-tune-steps", "0"], features())
