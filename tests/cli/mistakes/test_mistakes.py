"""Mistakes of a first day: each ends in seconds with one line that begins with "error:", and without a traceback."""

import json
import logging
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.cli import scripts
from megatron_lancet.planning.plan_file import PlanFile, made_for, write_plan_file
from megatron_lancet.schedule.plan import fixed_plan
from tests.ranks import launch
from tests.ranks.pretraining import EP2, command_line

pytestmark = pytest.mark.distributed

WITHIN_S = 60
"""Of a busy machine; each takes about two seconds."""
NUM_AT_A_TIME = 2


@dataclass(frozen=True)
class Mistake:
    """A training that is refused.

    Attributes:
        words: further flags; ``{name}`` stands for a file of the fixture ``files``.
        message: a part of the line, with the same names.
        env: further environment variables.
        num_ranks: that the launcher names. One process is started: a mistake is found before ranks meet.
    """

    words: str
    message: str
    env: dict[str, str] = field(default_factory=dict)
    num_ranks: int = 2


MISTAKES = {
    "plan that is no file": Mistake("--lancet-plan fast", "expects auto, off or a plan file; there is no file fast"),
    "misspelt flag": Mistake("--lancet-num-chunk 2", "--lancet-num-chunk: did you mean --lancet-num-chunks?"),
    "negative chunks": Mistake("--lancet-num-chunks -1", "--lancet-num-chunks expects at least 1, got -1"),
    "half a chunk": Mistake("--lancet-num-chunks 2.5", "argument --lancet-num-chunks: invalid int value: '2.5'"),
    "experts over ranks": Mistake("--num-experts 7", "must be a multiple of --expert-model-parallel-size; got 7"),
    "ranks over groups": Mistake("", "must divide the ranks of a pipeline stage; there are 3 ranks", num_ranks=3),
    "plan of another model": Mistake("--lancet-plan {foreign_plan}", "was made for another model or layout"),
    "profile as plan": Mistake("--lancet-plan {profile}", "this is a profile; lancet plan make makes a plan of it"),
    "truncated plan": Mistake("--lancet-plan {half_plan}", "no JSON, or damaged"),
    "plan and chunks": Mistake("--lancet-plan {plan} --lancet-num-chunks 2", "--lancet-num-chunks 2 contradicts"),
    "missing data": Mistake("--data-path /no/such_document", "data file not found: /no/such_document.idx"),
    "data with suffix": Mistake("--data-path {data}.bin", "Give the prefix without .bin/.idx"),
    "truncated index": Mistake("--data-path {cut}", "{cut}.idx is damaged"),
    "empty part of the data": Mistake("--split 99999,1,0", "gives the valid part of {data} none of its"),
    "tokenizer that is missing": Mistake(
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model {missing}",
        "--tokenizer-model: no such file: {missing}",
    ),
    "tokenizer of another kind": Mistake(
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model {profile}",
        "--tokenizer-model {profile}: expected a SentencePiece model, as --tokenizer-type SentencePieceTokenizer says, "
        "found JSON",
    ),
    "report into a file": Mistake("--lancet-report {profile}", "{profile}: expected a folder, found a file"),
    "report below a file": Mistake("--lancet-report {profile}/report", "can't write there: Not a directory"),
    "report into no folder": Mistake("--lancet-report=", '--lancet-report expects a folder, got ""'),
    "flags in the environment": Mistake(
        "",
        "pass --lancet-num-chunks 2 on the command line, and unset LANCET_FLAGS",
        {"LANCET_FLAGS": "--lancet-num-chunks 2"},
    ),
    "two precisions": Mistake("--fp16 --bf16", "--fp16 and --bf16 exclude each other"),
    "hidden size over heads": Mistake("--hidden-size 63", "--hidden-size 63 is no multiple of --num-attention-heads 4"),
    "saves without interval": Mistake("--save {missing}", "--save needs --save-interval"),
    "smallest learning rate": Mistake("--min-lr 1", "--min-lr 1 is above --lr 0.001"),
    "batch over ranks": Mistake("--global-batch-size 15", "eval_global_batch_size (15) must be divisible by"),
    "CUDA graphs without a GPU": Mistake("--cuda-graph-impl local", "CUDA graphs need a GPU"),
    "two hops on one node": Mistake("--lancet-dispatch two-hop", "--lancet-dispatch two-hop is not possible"),
    "pairs of one micro-batch": Mistake(
        "--lancet-pairing on --lancet-num-chunks 1 --global-batch-size 8", "a step has one micro-batch"
    ),
    "no memory for dWs": Mistake("--lancet-dw-memory-mb=-5", "--lancet-dw-memory-mb expects a number of MB above 0"),
    "checkpoint that must be there": Mistake("--load {missing} --exit-on-missing-checkpoint", "no checkpoint in"),
    "port in use": Mistake(
        "--expert-model-parallel-size 1 --disable-bias-linear",
        "another program uses the port on which the ranks are to meet (EADDRINUSE)",
        {"MASTER_PORT": "{port}"},
        num_ranks=1,
    ),
}


@pytest.fixture(scope="module")
def port():
    """A port on which somebody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.fixture(scope="module")
def files(tmp_path_factory, token_data, port):
    """What the mistakes name."""
    folder = tmp_path_factory.mktemp("files")
    names = ("profile", "plan", "foreign_plan", "half_plan", "missing", "cut")
    files = {name: folder / name for name in names} | {"data": token_data, "port": port}
    profile = synthetic_profile(Machine("dmmm", chunk_counts=(1, 2)))
    files["profile"].write_text(profile.to_json())
    write_plan_file(files["plan"], PlanFile(fixed_plan(2), None))
    write_plan_file(files["foreign_plan"], PlanFile(fixed_plan(2), made_for(profile.model)))
    files["half_plan"].write_text(files["plan"].read_text()[:-20])
    for suffix in (".idx", ".bin"):
        content = Path(f"{token_data}{suffix}").read_bytes()
        Path(f"{files['cut']}{suffix}").write_bytes(content[:-100] if suffix == ".idx" else content)
    return files


@pytest.fixture(scope="module")
def ends(files, tmp_path_factory):
    """How each training of :data:`MISTAKES` ended: a few at a time, because each only waits for its imports."""

    def run(mistake: Mistake) -> launch.RankResult:
        words = [word.format(**files) for word in mistake.words.split()]
        arguments = command_line(files["data"], [*EP2, "--train-iters", 2, *words])
        world = {"WORLD_SIZE": str(mistake.num_ranks), "LOCAL_WORLD_SIZE": str(mistake.num_ranks)}
        env = world | {name: text.format(**files) for name, text in mistake.env.items()}
        folder = tmp_path_factory.mktemp("mistake")
        script = launch.REPO / "pretrain_gpt_moe.py"
        # Not launch.run, which tries again where a port is in use.
        [result] = launch.finish(launch.start(script, arguments, 1, folder, env), folder, WITHIN_S)
        return result

    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        return dict(zip(MISTAKES, pool.map(run, MISTAKES.values()), strict=True))


def check(output: str, message: str) -> None:
    """One line that tells of the mistake, nothing of our insides, and no list of Megatron's arguments."""
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, output
    assert message in errors[0]
    assert output.splitlines()[-1] == errors[0]
    assert "Traceback" not in output
    assert "No CUDA runtime is found" not in output
    assert " ..........." not in output


@pytest.mark.parametrize("name", MISTAKES)
def test_training_refuses_a_mistake_in_one_line(ends, files, name):
    assert ends[name].returncode == 2, ends[name].output
    check(ends[name].output, MISTAKES[name].message.format(**files))


COMMANDS = {
    "plan make": "the following arguments are required: PROFILE, --output. lancet plan make --help explains",
    "plan make {script} --output {missing}": "no usable profile: {script}: no JSON, or damaged",
    "plan make {profile} --output {missing} --inter-gbps 400": "--inter-gbps is about links between nodes",
    "plan simulate {profile} --inter-latency-us 3": "pass --ranks-per-node too, or drop it",
    "plan simulate {profile} --world-sizes 8 --ranks-per-node 3": "--ranks-per-node 3 does not divide the 8 ranks",
    "plan simulate {plan}": "no usable profile: {plan}: this is a plan, expected a profile",
    "plan explain {profile}": "no usable plan: {profile}: this is a profile",
    "plan experts {missing}": "no usable load of experts: {missing}: can't be read",
    "plan step": "expected a launch script, or flags of Megatron, found nothing",
    "data corpus": "the following arguments are required: --output",
    "data tokenizer": "the following arguments are required: --input, --output-prefix, --vocab-size",
    "data encode": "the following arguments are required: --input, --output-prefix, --tokenizer-type",
    "plan mak": "there is no command 'plan mak'",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_command_refuses_a_mistake_in_one_line(files, tmp_path, capsys, monkeypatch, words):
    script = tmp_path / "train.sh"
    script.write_text("torchrun pretrain_gpt_moe.py\n")
    names = {**files, "script": script}
    monkeypatch.setattr(sys, "argv", ["lancet", *(word.format(**names) for word in words.split())])
    with pytest.raises(SystemExit) as end:
        scripts.main()
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    check(printed.err, COMMANDS[words].format(**names))


def test_explanation_says_which_network_it_assumes(files, tmp_path, capsys, monkeypatch):
    plan = tmp_path / "plan.json"
    network = ["--ranks-per-node", "2", "--intra-gbps", "3600", "--inter-gbps", "0.4"]
    for words in (
        ["plan", "make", files["profile"], "--output", plan, *network],
        ["plan", "explain", plan, "--profile", files["profile"]],
    ):
        monkeypatch.setattr(sys, "argv", ["lancet", *map(str, words)])
        scripts.main()
    explained = capsys.readouterr().out
    predicted_ms = json.loads(plan.read_text())["prediction"]["step_ms"]
    assert "network: as profiled: a rank sends at" in explained
    assert f"note: the plan file predicts {predicted_ms:.1f} ms, so it was made for another network" in explained


@pytest.mark.parametrize(("text", "is_shown"), [("No CUDA runtime is found, using '%s'", False), ("other", True)])
def test_missing_cuda_runtime_is_no_warning(text, is_shown):
    """torch warns in every process on a machine without a GPU, and a run says which device it found."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    record = logger.makeRecord(logger.name, logging.WARNING, "cpp_extension.py", 1, text, (), None)
    assert bool(logger.filter(record)) == is_shown
