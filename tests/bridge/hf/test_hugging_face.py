"""Hugging Face weights in and out of real runs, compared with ``transformers`` on the same tokens."""

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_lancet.planning.load.placement import placement_to_json
from tests import te_cpu
from tests.ranks import launch
from tests.ranks.preloaded import MORE, Preloaded

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(700),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.bridge") is None, reason="needs Megatron-Bridge: make test-bridge"
    ),
]
PYTHONPATH = os.pathsep.join([os.environ.get("PYTHONPATH", "").split(os.pathsep)[0], str(launch.REPO)])
HERE = Path(__file__).parent
TOLERANCE = 1e-5
"""Relative: Megatron sums in another order than transformers; both in fp32."""
FAMILIES = ("qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral")
SHORT_RUN = (
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-3 --lr-decay-iters 40 "
    "--log-interval 1 --eval-iters 0 --eval-interval 1000 --split 9,1,0 --tokenizer-type NullTokenizer "
    "--vocab-size 255 --mock-data --num-workers 0 --lancet-cache off --moe-aux-loss-coeff 0 --save-interval 3"
).split()
EP2 = ["--expert-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
TP2 = ["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "1", "--sequence-parallel"]
OFF = ["--lancet-plan", "off"]
TE = ["--transformer-impl", "transformer_engine", "--moe-grouped-gemm"]
ONE_CHUNK = ["--lancet-num-chunks", "1"]
TWO_CHUNKS = ["--lancet-num-chunks", "2"]
IN_SEQUENCE = [*TWO_CHUNKS, "--lancet-chunk-dim", "sequence"]
PAIRS = [*ONE_CHUNK, "--lancet-pairing", "on", "--lancet-dispatch", "dedup"]


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        ranks: groups of ranks with the same tokens.
        is_placed: whether experts are on other ranks than Megatron's.
        te: whether layers are Transformer Engine's, whose kernels the tests stand in for.
    """

    family: str
    extra: list[str]
    ranks: list[list[int]]
    gradients: bool = False
    num_ranks: int = 2
    plan: str = "off: stock Megatron modules"
    is_placed: bool = False
    te: bool = False


COPIES = ("4.embed_tokens.weight", "4.shared_head.head.weight")
"""Tensors that a file repeats."""
BIAS = ".e_score_correction_bias"
TWO = [[0], [1]]
CASES = {
    "qwen3_moe-stock": Case("qwen3_moe", OFF + EP2, TWO, gradients=True),
    "qwen3_moe-pairs": Case("qwen3_moe", [*EP2, *PAIRS], TWO, gradients=True, plan="dispatch=dedup paired"),
    "qwen3_moe-sequence": Case("qwen3_moe", [*EP2, *IN_SEQUENCE], TWO, gradients=True, plan="chunks=2 dim=sequence"),
    "qwen3_moe-placed": Case("qwen3_moe", [*EP2, *TWO_CHUNKS], TWO, plan="chunks=2", is_placed=True),
    "deepseek_v3-mtp": Case("deepseek_v3-mtp", [*EP2, *TWO_CHUNKS], TWO, plan="chunks=2"),
    **{
        f"{family}-te": Case(family, [*EP2, *TWO_CHUNKS, *TE], TWO, te=True, plan="chunks=2") for family in FAMILIES[:2]
    },
    "qwen3_moe-pipeline": Case("qwen3_moe", [*EP2, *PP2, *TWO_CHUNKS], [[0, 2], [1, 3]], num_ranks=4, plan="chunks=2"),
    **{f"{family}-alone": Case(family, OFF, [[0]], num_ranks=1) for family in FAMILIES},
    **{
        f"{family}-two-chunks": Case(family, [*EP2, *TWO_CHUNKS], TWO, family == "qwen3_moe", plan="chunks=2")
        for family in FAMILIES
    },
    **{f"{family}-tp": Case(family, [*EP2, *TP2, *ONE_CHUNK], [[0, 1]], plan="chunks=1") for family in FAMILIES},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    run_alone(HERE / "make_models.py", folder, *FAMILIES, "deepseek_v3-mtp")
    return folder


def run_alone(script, *args):
    """Runs a program that uses transformers without Megatron, whose CPU platform it would not survive."""
    done = subprocess.run(
        [sys.executable, script, *map(str, args)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Processes that fork ranks, without and with Transformer Engine, each started when a test needs it."""
    environment = {**launch.rank_environment(0, 1, 0), "PYTHONPATH": PYTHONPATH, MORE: "tests.bridge.preload"}
    with ExitStack() as stack:

        @functools.cache
        def server(te):
            own = te_cpu.ENVIRONMENT if te else {}
            found = Preloaded({**environment, **own}, tmp_path_factory.mktemp("s"), te=te)
            stack.callback(found.stop)
            return found

        yield server


@dataclass(frozen=True)
class Ran:
    folder: Path
    results: list[launch.RankResult]

    @property
    def output(self):
        return "\n".join(one.output for one in self.results)


def run(servers, model, case, folder, extra=()):
    """A run from a model's folder, whether it ends well or not."""
    folder.mkdir(parents=True)
    command = [
        *(str(HERE / "hf_worker.py"), "--lancet-from-hf", str(model), "--lancet-save-hf", str(folder / "saved")),
        *(*SHORT_RUN, "--save", str(folder / "checkpoints"), *case.extra, *extra),
    ]
    if case.is_placed:
        placement = folder / "placement.json"
        placement.write_text(placement_to_json({2: (5, 1, 0, 7, 3, 2, 6, 4), 4: (7, 6, 5, 4, 3, 2, 1, 0)}))
        command += ["--lancet-expert-placement", str(placement)]
    port = launch.free_port()
    ranks = []
    for rank in range(case.num_ranks):
        environment = {
            **launch.rank_environment(rank, case.num_ranks, port),
            "PYTHONPATH": PYTHONPATH,
            "LANCET_TEST_RESULT": str(folder),
            **({"LANCET_TEST_GRADIENTS": "1"} if case.gradients else {}),
            **(te_cpu.ENVIRONMENT if case.te else {}),
        }
        log = folder / f"rank{rank}.log"
        log.write_text("")
        ranks.append(servers(case.te).start(command, environment, log, launch.REPO))
    return Ran(folder, launch.finish(ranks, folder, 120))


@pytest.fixture(scope="module")
def ran(servers, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    found = {name: run(servers, models / case.family, case, folder / name) for name, case in CASES.items()}
    for one in found.values():
        launch.check(one.results)
    return found


@pytest.fixture(scope="module")
def expected(ran, models, tmp_path_factory):
    """transformers' answers for the first step of each run, and for the step behind the saved model."""
    jobs = [
        {
            "model": str(model),
            "step": step,
            "gradients": step == 0 and case.gradients,
            "ranks": [[str(ran[name].folder / f"rank{rank}.pt") for rank in group] for group in case.ranks],
        }
        for name, case in CASES.items()
        for model, step in ((models / case.family, 0), (ran[name].folder / "saved/iter_0000003", 3))
    ]
    folder = tmp_path_factory.mktemp("answers")
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run_alone(HERE / "oracle.py", folder / "jobs.json", folder / "answers.json")
    answers = json.loads((folder / "answers.json").read_text())
    return {name: {"first": answers[2 * i], "saved": answers[2 * i + 1]} for i, name in enumerate(CASES)}


def same_to_the_bit(first, second):
    from safetensors.torch import load_file

    one, other = (load_file(folder / "model.safetensors") for folder in (first, second))
    one = {name: value for name, value in one.items() if not name.endswith(COPIES)}
    same = {name for name in one.keys() & other.keys() if one[name].dtype == other[name].dtype}
    return one.keys() == other.keys() == same and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("name", CASES)
def test_run_computes_what_transformers_does(name, expected, ran):
    first = expected[name]["first"]
    assert first["num_calls"] == 4
    assert first["losses"] < TOLERANCE
    assert first["logits"] < TOLERANCE
    assert CASES[name].plan in ran[name].output


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.gradients])
def test_gradients_are_those_of_transformers(name, expected):
    assert expected[name]["first"]["num_gradients"] == 135
    assert expected[name]["first"]["gradients"] < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_model_comes_out_as_it_went_in(name, ran, models):
    assert same_to_the_bit(models / CASES[name].family, ran[name].folder / "iter_0000000")


@pytest.mark.parametrize("name", CASES)
def test_trained_model_is_the_same_in_transformers(name, expected, ran, models):
    saved = expected[name]["saved"]
    assert saved["losses"] < TOLERANCE
    assert saved["logits"] < TOLERANCE
    assert not same_to_the_bit(models / CASES[name].family, ran[name].folder / "saved/iter_0000003")
    assert {path.name for path in (ran[name].folder / "saved").iterdir()} == {"iter_0000003", "iter_0000004"}


def test_checkpoint_of_a_run_becomes_a_folder(ran, servers, models, tmp_path):
    """The same command with no step left to do, on another number of ranks."""
    name, first = "qwen3_moe-two-chunks", ran["qwen3_moe-two-chunks"].folder
    alone = Case("qwen3_moe", [], [[0]], num_ranks=1)
    load = ["--load", str(first / "checkpoints"), "--no-load-optim", "--no-load-rng"]
    again = run(servers, models / "qwen3_moe", alone, tmp_path / name, load)
    launch.check(again.results)
    assert [path.name for path in (again.folder / "saved").iterdir()] == ["iter_0000004"]
    assert same_to_the_bit(first / "saved/iter_0000004", again.folder / "saved/iter_0000004")


def export(servers, folder, *arguments, num_ranks=1):
    """Runs ``lancet export-hf``."""
    folder.mkdir()
    port = launch.free_port()
    ranks = []
    for rank in range(num_ranks):
        environment = {**launch.rank_environment(rank, num_ranks, port), "PYTHONPATH": PYTHONPATH}
        log = folder / f"rank{rank}.log"
        log.write_text("")
        command = [str(launch.REPO / "tools/export_hf.py"), *map(str, arguments)]
        ranks.append(servers(False).start(command, environment, log, launch.REPO))
    return launch.finish(ranks, folder, 120)


@pytest.mark.parametrize(("family", "num_ranks"), [("qwen3_moe", 2), ("deepseek_v3", 1)])
def test_checkpoint_is_exported(family, num_ranks, ran, servers, models, tmp_path):
    first = ran[f"{family}-two-chunks"].folder
    arguments = ["--load", first / "checkpoints", "--from-hf", models / family, "--output", tmp_path / "out"]
    launch.check(export(servers, tmp_path / "ranks", *arguments, num_ranks=num_ranks))
    assert same_to_the_bit(first / "saved/iter_0000004", tmp_path / "out")
    assert (tmp_path / "out/config.json").read_text() == (first / "saved/iter_0000004/config.json").read_text()


@pytest.mark.parametrize(
    ("checkpoint", "folder", "line"),
    [
        ("qwen3_moe-two-chunks", "mixtral", r"expected a checkpoint with \w+ .*, as .*config\.json says, found"),
        ("deepseek_v3-mtp", "deepseek_v3-mtp", "expected a model without predictions of further tokens"),
    ],
)
def test_export_of_another_model_is_refused(checkpoint, folder, line, ran, servers, models, tmp_path):
    arguments = ["--load", ran[checkpoint].folder / "checkpoints", "--from-hf", models / folder]
    (done,) = export(servers, tmp_path / "ranks", *arguments, "--output", tmp_path / "out")
    assert done.returncode == 2
    assert re.search(line, done.output)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_half_precision_comes_out_in_half_precision(family, servers, models, tmp_path):
    """But biases of routers in fp32, in which they choose experts."""
    from safetensors.torch import load_file

    done = run(servers, models / family, Case(family, [*EP2, *TWO_CHUNKS, "--bf16"], TWO), tmp_path / "run")
    launch.check(done.results)
    source = load_file(models / family / "model.safetensors")
    found = load_file(done.folder / "iter_0000000/model.safetensors")
    assert found.keys() == source.keys()
    expected = {name: value if name.endswith(BIAS) else value.bfloat16() for name, value in source.items()}
    assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in expected.items()}
    assert all(found[name].equal(value) for name, value in expected.items())
    assert json.loads((done.folder / "iter_0000000/config.json").read_text())["dtype"] == "bfloat16"
    arguments = ["--load", done.folder / "checkpoints", "--from-hf", models / family, "--output", tmp_path / "out"]
    launch.check(export(servers, tmp_path / "ranks", *arguments))
    assert same_to_the_bit(done.folder / "saved/iter_0000004", tmp_path / "out")


def changed_model(model, place, change):
    """A copy of a model's folder with other weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, place)
    weights = load_file(place / "model.safetensors")
    change(weights)
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return place


LAST = "model.layers.3.mlp.experts.7"


@pytest.mark.parametrize(
    ("change", "extra", "message"),
    [
        (lambda weights: weights.pop(f"{LAST}.down_proj.weight"), [], "expected weights for decoder.layers.3.mlp."),
        (
            lambda weights: weights.update({f"{LAST}.bias": weights["model.norm.weight"].clone()}),
            [],
            f"the model has no place for its weights {LAST}.bias, because Megatron-Bridge describes Qwen3Moe",
        ),
        (lambda weights: None, ["--vocab-size", "300"], "expected a tokenizer of at most 256 tokens, found 300"),
    ],
    ids=["missing", "unknown", "tokenizer"],
)
def test_folder_that_does_not_fit_is_refused(change, extra, message, servers, models, tmp_path):
    model = changed_model(models / "qwen3_moe", tmp_path / "model", change)
    case = Case("qwen3_moe", [*EP2, *TWO_CHUNKS], TWO)
    refused = run(servers, model, case, tmp_path / "run", extra)
    assert all(one.returncode for one in refused.results)
    (line,) = {line for line in refused.output.splitlines() if line.startswith("error:")}
    assert message in line
    assert not (refused.folder / "saved").exists() or not any((refused.folder / "saved").iterdir())
