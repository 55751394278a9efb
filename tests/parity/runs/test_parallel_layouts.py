"""Parallel layouts on the CPU: stock trains the same model in each, and the overlap works where it is offered.

Traces of the stock runs become profiles.
"""

from collections.abc import Sequence

import pytest

from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.from_trace.profile import STOCK as STOCK_STEP
from megatron_lancet.lab.from_trace.profile import profile_from_traces
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind, Phase
from tests.ranks.checkpoints import tensors_in
from tests.ranks.pretraining import EP2, Run, pretrain

pytestmark = pytest.mark.distributed

NUM_ITERS = 5
STOCK = ["--lancet-plan", "off"]
OVERLAP = ["--lancet-num-chunks", "2"]
TENSOR = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]
CONTEXT = ["--context-parallel-size", "2"]
LARGER_BATCH = ["--global-batch-size", "32"]
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "20000"]
# Two virtual stages on two ranks; Megatron's experts can't add a bias without expert parallelism.
MODEL = ["--disable-bias-linear", "--num-layers", "4"]
# Layouts add partial sums in another order.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def first_step(tmp_path_factory, token_data):
    """A checkpoint of one rank's first step: layouts draw different weights, but can load the same."""
    folder = tmp_path_factory.mktemp("first-step")
    extra = [*STOCK, *MODEL, "--save", folder / "checkpoints", "--save-interval", "1", "--no-save-optim"]
    pretrain(token_data, extra, folder, num_ranks=1, train_iters=1)
    return ["--load", folder / "checkpoints", "--no-load-optim", "--no-load-rng"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, token_data, first_step):
    """The reference: further steps of stock Megatron on one rank, for a global batch size."""
    runs: dict[str, Run] = {}

    def run(batch: Sequence[str] = ()) -> Run:
        key = " ".join(batch)
        if key not in runs:
            folder = tmp_path_factory.mktemp("one-rank")
            runs[key] = pretrain(token_data, [*STOCK, *MODEL, *first_step, *batch], folder, 1, NUM_ITERS)
        return runs[key]

    return run


LAYOUTS = {
    # Flags, ranks, and of a rank: positions, micro-batches of a step, pipeline stage of each layer.
    "tensor+sequence": ([*TENSOR, "--expert-tensor-parallel-size", "1"], 2, 16, 4, (0, 0, 0, 0)),
    "pipeline": ([*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2"], 4, 32, 2, (0, 1, 0, 1)),
    "context": (CONTEXT, 2, 16, 4, (0, 0, 0, 0)),
}
IN_LAYERS = {OpKind.ATTENTION, OpKind.ROUTE, OpKind.PREPROCESS, OpKind.EXPERTS, OpKind.POSTPROCESS}


def test_stock_losses_with_ep_are_those_of_one_rank(one_rank, first_step, tmp_path, token_data):
    run = pretrain(token_data, [*STOCK, *MODEL, *first_step, *EP2], tmp_path, 2, NUM_ITERS)
    check_losses(run, one_rank())


@pytest.mark.parametrize("name", LAYOUTS)
def test_stock_losses_are_alike_in_all_layouts(one_rank, first_step, tmp_path, token_data, name):
    layout, num_ranks, *facts = LAYOUTS[name]
    # A run that goes on from a checkpoint: Megatron counts the steps before the first one from there, and must stop in
    # the run's last step.
    profiler = profiler_flags(3, NUM_ITERS, range(num_ranks), tmp_path)
    flags = [*STOCK, *MODEL, *first_step, *EP2, *layout, *profiler]
    run = pretrain(token_data, flags, tmp_path, num_ranks, NUM_ITERS)
    check_losses(run, one_rank())
    check_profile(profile_from_traces(traces_in(tmp_path)), *facts)


def check_losses(run, expected):
    assert len(run.losses) == NUM_ITERS - 1
    for name in ("lm loss", "grad norm"):
        assert run.series(name) == pytest.approx(expected.series(name), rel=TOLERANCE), name


def profiler_flags(first_step, end_step, ranks, folder):
    """Megatron's own, which write into ``folder``."""
    flags = f"--profile --use-pytorch-profiler --pytorch-profiler-collect-shapes --profile-step-start {first_step}"
    flags += f" --profile-step-end {end_step} --profile-ranks {' '.join(map(str, ranks))}"
    return [*flags.split(), "--tensorboard-dir", folder / "tensorboard"]


def traces_in(folder):
    return sorted((folder / "torch_profile").glob("rank-*.json.gz"))


def check_profile(profile, seq_length, num_micro_batches, stage_of_layer):
    """Sizes and counts are those of the layout, every op has a time, and all ops together fit into the step."""
    model = profile.model
    assert (model.micro_batch_size, model.seq_length, model.num_micro_batches) == (4, seq_length, num_micro_batches)
    assert (model.layer_kinds, model.stage_of_layer) == ((LayerKind.MOE,) * 4, stage_of_layer)
    assert (model.topk, model.num_experts, model.ep_size) == (2, 4, 2)
    # Each rank's experts get rows of the tokens of two ranks.
    assert [(one.layer, sum(one.received)) for one in profile.routing] == [
        (layer, 2 * 4 * seq_length * 2) for layer in (1, 2, 3, 4)
    ]
    whole = {(op.phase, op.kind): op.ms for op in profile.ops if op.num_chunks == 1}
    kinds = IN_LAYERS | {OpKind.EMBEDDING, OpKind.HEAD}
    assert set(whole) == {(phase, kind) for phase in (Phase.FORWARD, Phase.INPUT_GRAD) for kind in kinds}
    assert all(ms > 0 for ms in whole.values())
    assert len([dw for dw in profile.weight_grads if dw.num_chunks == 1]) == 2 + 2 * 2 + 1
    num_layers = stage_of_layer.count(0)
    of_layers_ms = num_layers * sum(ms for (_, kind), ms in whole.items() if kind in IN_LAYERS)
    assert num_micro_batches * of_layers_ms + profile.rest_ms < profile.measured_steps_ms[STOCK_STEP]


OVERLAPPING = {
    # One micro-batch per step.
    "EP4": ["--expert-model-parallel-size", "4"],
    "EP2xDP2": [*EP2, *DISTRIBUTED],
    # Two.
    "EP2xTP2": [*EP2, *TENSOR, "--expert-tensor-parallel-size", "1", *DISTRIBUTED],
    "EP2xETP2": [*EP2, *TENSOR],
    # Four.
    "EP2xPP2": [*EP2, *PIPELINE, "--overlap-grad-reduce"],
    "EP2xPP2 interleaved": [*EP2, *PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2", "--overlap-grad-reduce"],
}


FURTHER = "EP4", "EP2xTP2"
"""Other tests have one chunk of these in the real loop; gradients of their chunks are in ``parity/gradients``."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(flags, id=name, marks=[pytest.mark.nightly] * (name in FURTHER))
        for name, flags in OVERLAPPING.items()
    ],
)
def test_losses_with_overlap_equal_stock_on_one_rank(one_rank, first_step, token_data, tmp_path, layout):
    batch = LARGER_BATCH if layout[2:4] == PIPELINE else []
    ours = pretrain(token_data, [*OVERLAP, *MODEL, *first_step, *layout, *batch], tmp_path, 4, NUM_ITERS)
    assert "chunks=2" in ours.outputs[0]
    assert "megatron_lancet.model.transformer_block" in ours.model_modules
    for name in ("lm loss", "grad norm", "load_balancing_loss", "z_loss"):
        assert ours.series(name) == pytest.approx(one_rank(batch).series(name), rel=TOLERANCE), name


def test_stock_continues_from_a_checkpoint_of_two_hops(token_data, tmp_path):
    """Two nodes of two ranks on this machine, one expert on each rank; sums of two, so not a bit may differ."""
    both = ["--expert-model-parallel-size", "4"]
    hops = ["--moe-token-dispatcher-type", "flex", "--lancet-ranks-per-node", 2, "--lancet-num-chunks", 1]
    saving = ["--save", tmp_path / "checkpoints", "--save-interval", 2]
    ours = pretrain(token_data, [*both, *hops, *saving], tmp_path / "ours", 4, NUM_ITERS)
    assert "flex runs as the plan's all-to-alls, one row per token and node" in ours.outputs[0]
    assert "dw-window=4 dispatch=two-hop); two hops over 2 nodes x 2 ranks" in ours.outputs[0]
    loading = ["--load", tmp_path / "checkpoints", "--ckpt-step", 2, "--use-checkpoint-args"]
    # The experts come from the checkpoint: the command line may lack them.
    expected = pretrain(token_data, [*both, *STOCK, *loading, "--num-experts", 0], tmp_path / "stock", 4, NUM_ITERS)
    assert len(expected.losses) == NUM_ITERS - 2
    assert ours.losses[2:] == expected.losses


@pytest.mark.parametrize(
    ("stages", "num_stages"),
    [
        # The last virtual stage has no layer next to the multi-token prediction.
        ("Et|t|tt|mL", 2),
        # A stage has nothing, and one the prediction alone, which reads tokens on a stage that is not the last.
        ("Et|t||tt|m|L", 3),
    ],
)
def test_one_chunk_equals_stock_with_virtual_stages_and_mtp(token_data, tmp_path, stages, num_stages):
    pipeline = ["--pipeline-model-parallel-size", num_stages, "--pipeline-model-parallel-layout", stages]
    batch = ["--global-batch-size", 16 * num_stages]
    positions = ["--position-embedding-type", "rope"]
    layout = [*MODEL, *EP2, *pipeline, "--mtp-num-layers", 1, *positions, "--overlap-grad-reduce", *batch]
    stock, num_ranks = tmp_path / "stock", 2 * num_stages
    recorded = profiler_flags(1, 3, range(0, num_ranks, 2), stock)
    expected = pretrain(token_data, [*STOCK, *layout, *recorded], stock, num_ranks, train_iters=3)
    with pytest.raises(RecordError, match="as multi-token predictions have"):
        profile_from_traces(traces_in(stock))
    ours = pretrain(token_data, ["--lancet-num-chunks", "1", *layout], tmp_path / "ours", num_ranks, train_iters=3)
    assert "megatron_lancet.model.transformer_block" in ours.model_modules
    assert len(ours.losses) == 3
    assert ours.losses == expected.losses
    assert ours.series("mtp_1 loss") == expected.series("mtp_1 loss")


def test_losses_with_context_parallelism_equal_stock_without(one_rank, first_step, token_data, tmp_path):
    layout = [*EP2, *CONTEXT, *DISTRIBUTED]
    ours = pretrain(token_data, [*OVERLAP, *MODEL, *first_step, *layout], tmp_path, 2, NUM_ITERS)
    assert "chunks=2 dim=batch" in ours.outputs[0]
    assert "megatron_lancet.model.transformer_block" in ours.model_modules
    for name in ("lm loss", "grad norm", "load_balancing_loss", "z_loss"):
        assert ours.series(name) == pytest.approx(one_rank().series(name), rel=TOLERANCE), name


def test_experts_of_ranks_have_different_initial_weights(token_data, tmp_path):
    """Without a GPU, too, experts are drawn from Megatron's expert-parallel random state."""
    checkpoints = tmp_path / "checkpoints"
    extra = [*EP2, *STOCK, "--lr", "0", "--save", checkpoints, "--save-interval", "1", "--no-save-optim"]
    pretrain(token_data, extra, tmp_path, train_iters=1)
    step = checkpoints / "iter_0000001"
    experts = tensors_in(step, lambda name: ".experts." in name and name.endswith("weight"))
    assert len(experts) >= 1
    for name, by_layer in experts.items():
        weights = by_layer.flatten(0, 1)  # [layers * experts, ...]
        for one in range(len(weights)):
            for other in range(one):
                assert not weights[one].equal(weights[other]), f"{name}: experts {other} and {one} start equal"
