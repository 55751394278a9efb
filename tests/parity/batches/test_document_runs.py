"""Runs with --dataloader-inter-document-masking next to stock with an S x S mask of documents.

Losses of training and of validation; every run goes on from the checkpoint of one first step, in its own layout.
"""

import json
import re
from pathlib import Path

import pytest

from tests import data
from tests.ranks import launch
from tests.ranks.pretraining import EP2, command_line, pretrain

pytestmark = pytest.mark.distributed

SIZES_WORKER = Path(__file__).with_name("sizes_worker.py")
NUM_ITERS = 4
STOCK = ["--lancet-plan", "off"]
DOCUMENTS = ["--dataloader-inter-document-masking"]
MASK = ["--reset-attention-mask", "--reset-position-ids"]
# Weights that are large enough for what a token attends to to show in the loss.
MODEL = (
    "--num-layers 4 --disable-bias-linear --position-embedding-type rope --init-method-std 0.1 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-1 "
    "--split 8,1,1 --eval-iters 1 --eval-interval 3"
).split()
COMPARED = ("lm loss", "grad norm", "seq_load_balancing_loss")
TOLERANCE = 1e-5
TWO_CHUNKS = ["--lancet-num-chunks", "2"]
TENSOR = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-tensor-parallel-size", "1"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]
VIRTUAL = [*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2"]
RUNS: dict[str, tuple[int, list[str]]] = {
    "sequence chunks": (2, [*EP2, *TWO_CHUNKS, "--lancet-chunk-dim", "sequence"]),
    "Megatron's layers, no experts shared": (1, STOCK),
    "tensor and sequence": (2, [*EP2, *TENSOR, *TWO_CHUNKS]),
    "context": (2, [*EP2, "--context-parallel-size", "2", *TWO_CHUNKS]),
    "virtual pipeline stages, paired": (4, [*EP2, *VIRTUAL, *TWO_CHUNKS, "--lancet-pairing", "on"]),
    "Megatron's layers on pipeline stages": (2, [*PIPELINE, *STOCK]),
}
SLOW = "Megatron's layers, no experts shared", "Megatron's layers on pipeline stages"


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return data.write_short_documents(tmp_path_factory.mktemp("documents") / "short_document")


@pytest.fixture(scope="module")
def first_step(tmp_path_factory, documents):
    """A checkpoint of one rank's first step."""
    folder = tmp_path_factory.mktemp("first-step")
    extra = [*STOCK, *MODEL, "--save", folder / "checkpoints", "--save-interval", "1", "--no-save-optim"]
    pretrain(documents, extra, folder, num_ranks=1, train_iters=1)
    return ["--load", folder / "checkpoints", "--no-load-optim", "--no-load-rng"]


@pytest.fixture(scope="module")
def run(documents, first_step, tmp_path_factory):
    def go_on(extra, num_ranks):
        flags = [*MODEL, *first_step, *extra]
        return pretrain(documents, flags, tmp_path_factory.mktemp("run"), num_ranks, NUM_ITERS)

    return go_on


@pytest.fixture(scope="module")
def with_mask(run):
    return run([*STOCK, *MASK], 1)


def validation_losses(run) -> list[float]:
    """After step 3, and of the validation and the test set at the end."""
    return [float(loss) for loss in re.findall(r"validation loss at .*?lm loss value: (\S+)", "\n".join(run.outputs))]


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in RUNS])
def test_losses_equal_those_with_a_mask_of_documents(run, with_mask, case):
    num_ranks, extra = RUNS[case]
    ours = run([*DOCUMENTS, *extra], num_ranks)
    assert ("megatron_lancet.model.transformer_block" in ours.model_modules) == (STOCK[0] not in extra)
    assert len(ours.losses) == NUM_ITERS - 1
    for name in COMPARED:
        assert ours.series(name) == pytest.approx(with_mask.series(name), rel=TOLERANCE), name
    assert len(validation_losses(ours)) == 3
    assert validation_losses(ours) == pytest.approx(validation_losses(with_mask), rel=TOLERANCE)


def test_te_losses_equal_those_of_local_layers_with_a_mask(documents, tmp_path):
    """Both are Megatron's own, and draw the same first weights; chunks are compared in ``parity/documents``."""
    flags = [*MODEL, *EP2, *STOCK]
    expected = pretrain(documents, [*flags, *MASK], tmp_path / "mask", 2, train_iters=2)
    te = [*DOCUMENTS, "--transformer-impl", "transformer_engine"]
    found = pretrain(documents, [*flags, *te], tmp_path / "te", 2, train_iters=2, te=True)
    assert "transformer_engine.pytorch.module.layernorm" in found.model_modules
    assert len(found.losses) == 2
    for name in COMPARED:
        assert found.series(name) == pytest.approx(expected.series(name), rel=TOLERANCE), name
    assert len(validation_losses(found)) == 2
    assert validation_losses(found) == pytest.approx(validation_losses(expected), rel=TOLERANCE)


def test_comparison_detects_attention_across_documents(run, with_mask):
    joined = run(STOCK, 1)
    for name in ("lm loss", "grad norm"):
        differences = [abs(a / b - 1) for a, b in zip(joined.series(name), with_mask.series(name), strict=True)]
        assert min(differences) > 30 * TOLERANCE
    assert validation_losses(joined) != pytest.approx(validation_losses(with_mask), rel=30 * TOLERANCE)


def test_micro_batches_of_any_size_on_pipeline_stages(first_step, tmp_path):
    """Each has one sample, of its own size: on expert-parallel ranks that run at the same time, too."""

    def losses(name, extra, num_ranks):
        folder = tmp_path / name
        sizes = ["--micro-batch-size", "1", "--global-batch-size", "8", "--eval-iters", "0", "--train-iters", "3"]
        arguments = command_line(Path("unused"), [*MODEL, *first_step, *DOCUMENTS, *sizes, *extra])
        at = arguments.index("--data-path")
        arguments[at : at + 2] = ["--mock-data"]
        split = arguments.index("--split")
        del arguments[split : split + 2]
        result = folder / "result.json"
        launch.check(
            launch.run(SIZES_WORKER, arguments, num_ranks, folder, env={"LANCET_TEST_RESULT": str(result)}),
        )
        return json.loads(result.read_text())

    expected = losses("one rank", STOCK, 1)
    assert len(expected) == 2
    for name, (num_ranks, extra) in {
        "stages": (4, [*EP2, *PIPELINE, *TWO_CHUNKS, "--lancet-chunk-dim", "sequence"]),
        "virtual stages": (4, [*EP2, *VIRTUAL, *TWO_CHUNKS, "--lancet-pairing", "on"]),
    }.items():
        found = losses(name, extra, num_ranks)
        for step, step_on_one_rank in zip(found, expected, strict=True):
            assert step == pytest.approx(step_on_one_rank, rel=TOLERANCE)
