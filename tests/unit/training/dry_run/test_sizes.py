"""Parameters that a dry run counts, against models that Megatron builds; memory against what autograd keeps."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.models.gpt import GPTModelBuilder
from megatron.training.models.hybrid import HybridModelBuilder
from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.dry_run.activations import _in_flight
from megatron_lancet.lab.dry_run.memory import optimizer_bytes_per_parameter
from megatron_lancet.lab.dry_run.parameters import Held
from megatron_lancet.lab.dry_run.report import Findings
from megatron_lancet.lab.dry_run.run import examine
from megatron_lancet.planning.sizes.saved_tensors import layer_tensors
from megatron_lancet.schedule.layers import LayerKind, pattern_of
from megatron_lancet.testkit.mock.mock_world import mock_world
from megatron_lancet.training import arguments
from megatron_lancet.training.megatron import patches
from megatron_lancet.training.platform.cpu import cpu_platform
from tests.small_gpt import local_hybrid_stack

SMALL = (
    "--lancet-dry-run --distributed-backend gloo --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16 --train-iters 4 "
    "--lr 1e-3 "
    "--mock-data --eval-interval 10 --tokenizer-type NullTokenizer --vocab-size 100 --make-vocab-size-divisible-by 16 "
    "--moe-token-dispatcher-type alltoall --attention-dropout 0 --hidden-dropout 0 --moe-router-topk 2 "
)
MOE = "--num-experts 8 --expert-model-parallel-size 2 --disable-bias-linear "
LATENT = (
    "--multi-latent-attention --kv-lora-rank 24 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 20 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --untie-embeddings-and-output-weights "
)
MODELS = {
    "dense": "--swiglu --group-query-attention --num-query-groups 2 --position-embedding-type rope",
    "biases": "--num-experts 8 --expert-model-parallel-size 2",
    "query and key norms": MOE + "--qk-layernorm --add-qkv-bias --kv-channels 24",
    "mixtral-like": MOE + "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --moe-ffn-hidden-size 96",
    "stages": MOE + "--pipeline-model-parallel-size 2 --moe-layer-freq ([0]+[1]*3) --tensor-model-parallel-size 2 "
    "--sequence-parallel",
    "expert tensor": MOE + "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel "
    "--moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate",
    "latent": MOE + LATENT + "--q-lora-rank 32 --qk-layernorm --tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "latent, whole queries": MOE + LATENT + "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
    "multi-token prediction": MOE + LATENT + "--mtp-num-layers 1 --pipeline-model-parallel-size 2 "
    "--pipeline-model-parallel-layout Et|tt|t|mL",
    "tied multi-token prediction": MOE + "--mtp-num-layers 1 --pipeline-model-parallel-size 2 "
    "--position-embedding-type rope",
    "repeated multi-token prediction": MOE + "--mtp-num-layers 2 --mtp-use-repeated-layer "
    "--position-embedding-type rope",
}


@pytest.fixture
def examined(monkeypatch):
    """A dry run of a small model on the CPU."""

    def make(flags: str) -> Findings:
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py", *shlex.split(SMALL + flags)])
        return examine()

    return make


@contextmanager
def world_of(findings: Findings) -> Iterator[None]:
    """Megatron's process groups for the layout, mocked."""
    layout = findings.layout
    with ExitStack() as stack:
        stack.enter_context(cpu_platform())
        stack.enter_context(mock_world(layout.num_ranks))
        stack.enter_context(patches.sequence_parallel_with_torch_norm())
        stack.enter_context(patches.fused_core_attention(findings.args.multi_latent_attention))
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            findings.args.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
        )
        stack.callback(parallel_state.destroy_model_parallel)
        model_parallel_cuda_manual_seed(1)
        yield


def built(findings: Findings, pp_rank: int) -> list[GPTModel]:
    """The virtual stages that Megatron builds for a pipeline rank."""
    parallel_state.set_pipeline_model_parallel_rank(pp_rank)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.pp = SimpleNamespace(rank=lambda: pp_rank, size=lambda: findings.layout.pipeline)
    builder = GPTModelBuilder(gpt_config_from_args(findings.args))
    virtual = findings.layout.virtual
    return [builder.build_model(groups, vp_stage=stage) for stage in (range(virtual) if virtual > 1 else (None,))]


def held_when_built(findings: Findings) -> list[Held]:
    """Parameters on a rank of each pipeline stage that Megatron builds."""
    held = []
    with world_of(findings):
        for rank in range(findings.layout.pipeline):
            parameters = [parameter for chunk in built(findings, rank) for parameter in chunk.parameters()]
            dense = sum(one.numel() for one in parameters if getattr(one, "allreduce", True))
            held.append(Held(dense, sum(one.numel() for one in parameters) - dense))
    return held


@pytest.mark.thorough
def test_experts_come_from_the_checkpoint(examined, monkeypatch, tmp_path):
    def load(args):
        args.num_experts, args.add_bias_linear = 8, False

    monkeypatch.setattr(arguments, "load_checkpoint_arguments", load)
    found = examined(f"--expert-model-parallel-size 2 --use-checkpoint-args --load {tmp_path}")
    assert found.size == examined(MOE).size


def test_tied_predictions_are_not_saved(examined):
    saved = MODELS["tied multi-token prediction"] + " --save checkpoints --save-interval 10"
    with pytest.raises(UsageError, match="--save with --mtp-num-layers and pipeline stages needs --untie-embeddings"):
        examined(saved)
    assert examined(f"{saved} --untie-embeddings-and-output-weights").size.total


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS.keys())
def test_estimated_parameters_equal_those_that_megatron_builds(examined, flags):
    findings = examined(flags)
    assert list(findings.size.held) == held_when_built(findings)


HYBRID = (
    f"{MOE} --distributed-backend nccl --no-gradient-accumulation-fusion --no-persist-layer-norm --qk-layernorm "
    "--moe-shared-expert-intermediate-size 48 --swiglu --attention-backend unfused --hybrid-layer-pattern "
)


def test_estimated_parameters_of_a_hybrid_model_equal_megatrons(examined):
    """Of local layers, whose stack has no final norm."""
    findings = examined(f"{HYBRID} *E*-*E")
    config = hybrid_config_from_args(findings.args)
    config.hybrid_stack_spec = local_hybrid_stack(config.transformer)
    with world_of(findings):
        model = HybridModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    dense = sum(one.numel() for one in model.parameters() if getattr(one, "allreduce", True))
    final_norm = 2 * findings.args.hidden_size
    all_of_them = sum(one.numel() for one in model.parameters())
    assert list(findings.size.held) == [Held(dense + final_norm, all_of_them - dense)]


def test_dry_run_reads_stages_of_hybrid_model_from_its_pattern(examined):
    findings = examined(f"{HYBRID} '*E|-E|*E-|*' --pipeline-model-parallel-size 2")
    layers = [["".join(pattern_of(chunk.layers)) for chunk in stage.chunks] for stage in findings.stages]
    assert layers == [["*E", "*E-"], ["-E", "*"]]
    assert [chunk.has_final_norm for stage in findings.stages for chunk in stage.chunks] == [False, False, False, True]
    even = examined(f"{HYBRID} *E-E --pipeline-model-parallel-size 2")
    assert [pattern_of(stage.layers) for stage in even.stages] == ["*E", "-E"]
    assert any("chunks=" in line for line in even.plan)


def test_estimated_activations_of_a_hybrid_model_add_up(examined):
    args = examined(f"{HYBRID} *E-").args
    attention, experts, mlp, dense, moe = (
        sum(saved.num_bytes for saved in layer_tensors(args, kind, saves_scores=True))
        for kind in (
            LayerKind.ATTENTION_ONLY,
            LayerKind.MOE_ONLY,
            LayerKind.MLP_ONLY,
            LayerKind.DENSE,
            LayerKind.MOE,
        )
    )
    assert dense == attention + mlp
    assert moe == attention + experts


def saved_bytes(findings: Findings) -> int:
    """What autograd keeps of a forward pass, without weights: each storage once."""
    args = findings.args
    with world_of(findings):
        (model,) = built(findings, 0)
        model.train()
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        tokens = torch.randint(args.padded_vocab_size, (args.micro_batch_size, args.seq_length))
        mask = torch.ones(1, 1, args.seq_length, args.seq_length).tril() < 0.5
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens, torch.arange(args.seq_length).expand_as(tokens), mask, labels=tokens)
        assert loss.requires_grad
        return sum(kept.values())


SAVING = {
    "dense": "--ffn-hidden-size 256 --swiglu --disable-bias-linear",
    "moe": "--num-experts 4 --expert-model-parallel-size 1 --disable-bias-linear --swiglu --moe-ffn-hidden-size 96",
    "latent": LATENT + "--disable-bias-linear --q-lora-rank 32 --ffn-hidden-size 256",
}


@pytest.mark.thorough
@pytest.mark.parametrize("flags", SAVING.values(), ids=SAVING.keys())
def test_estimated_activations_are_close_to_what_a_layer_keeps(examined, flags):
    """Less is estimated than kept here: norms and rotations on the CPU are not fused, and keep their steps."""
    larger = f"--hidden-size 128 --seq-length 128 --max-position-embeddings 128 --global-batch-size 2 {flags}"
    two, four = (examined(f"{larger} --num-layers {layers}") for layers in (2, 4))
    kept = (saved_bytes(four) - saved_bytes(two)) / 2
    # Of heads of two sizes torch's kernel for the CPU keeps the scores, like unfused attention.
    kind = LayerKind.MOE if "--num-experts" in flags else LayerKind.DENSE
    estimated = sum(saved.num_bytes for saved in layer_tensors(two.args, kind, saves_scores=True))
    assert 0.8 * kept < estimated < kept


def test_estimated_states_agree_with_megatrons_own_estimate(examined):
    """It spreads layers evenly and knows no biases and no learned positions."""
    findings = examined(
        "--num-experts 8 --expert-model-parallel-size 2 --disable-bias-linear --pipeline-model-parallel-size 2 --bf16 "
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel "
        "--position-embedding-type rope --use-distributed-optimizer --untie-embeddings-and-output-weights "
        "--lancet-world-size 16"
    )
    first = findings.memory[0]
    megatrons = compute_weight_and_optimizer_memory(findings.args)
    final_norm = 2 * 64 / 2 * (6 + 12 / 4)  # it spreads this one, too
    assert first.weights + first.gradients + first.optimizer == megatrons - final_norm


@pytest.mark.parametrize(
    ("flags", "per_parameter"),
    [
        ("", 8),
        ("--bf16", 12),
        ("--fp16", 12),
        ("--bf16 --optimizer sgd", 8),
        ("--bf16 --use-distributed-optimizer", 12),
    ],
)
def test_estimated_bytes_of_the_optimizer(examined, flags, per_parameter):
    assert optimizer_bytes_per_parameter(examined(f"{MOE} {flags}").args) == per_parameter


def test_estimated_precision_of_the_optimizer():
    flags = {"optimizer": "adam", "use_precision_aware_optimizer": True, "params_dtype": torch.bfloat16}
    flags |= {"main_params_dtype": torch.float32, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    flags |= {"optimizer_cpu_offload": False, "fp8_param_gather": False}
    assert optimizer_bytes_per_parameter(Namespace(**flags)) == 2 + 2 + 2
    assert optimizer_bytes_per_parameter(Namespace(**flags | {"fp8_param_gather": True})) == 4 + 2 + 2


PIPELINES = [
    # ranks of the pipeline, this one, virtual stages, micro-batches -> in flight by virtual stage, and so if paired
    ((1, 0, 1, 8), {0: 1}, {0: 1}),
    ((4, 0, 1, 8), {0: 4}, None),
    ((4, 3, 1, 8), {0: 1}, None),
    ((4, 0, 1, 2), {0: 2}, None),
    ((4, 0, 2, 8), {0: 7, 1: 4}, {0: 8, 1: 4}),
    ((4, 3, 2, 8), {0: 4, 1: 1}, {0: 4, 1: 2}),
    ((2, 1, 3, 2), {0: 2, 1: 2, 2: 1}, {0: 2, 1: 2, 2: 2}),
]


@pytest.mark.parametrize(("pipeline", "expected", "if_paired"), PIPELINES)
def test_number_of_pending_micro_batches_of_a_stage(pipeline, expected, if_paired):
    args = Namespace(microbatch_group_size_per_vp_stage=None)
    assert _in_flight(args, *pipeline, pairs=False) == expected
    if if_paired is not None:
        assert _in_flight(args, *pipeline, pairs=True) == if_paired


@pytest.mark.thorough
def test_estimated_activations_of_a_paired_plan_are_a_layer_more(examined):
    """Without pipeline stages; with virtual ones, a micro-batch of one of them."""

    def kept(flags: str) -> list[float]:
        return [memory.activations for memory in examined(f"{MOE} --moe-layer-freq ([0]+[1]*3) {flags}").memory]

    def of_one_layer(recompute: str = "") -> float:
        args = examined(f"{MOE} {recompute}").args
        return sum(saved.num_bytes for saved in layer_tensors(args, LayerKind.MOE, saves_scores=True))

    fixed = "--lancet-num-chunks 2 --lancet-pairing"
    (alone,), (beside,) = kept(f"{fixed} off"), kept(f"{fixed} on")
    assert beside - alone == pytest.approx(of_one_layer())
    # A plan's recomputed layers keep their inputs and their routers' (2 samples of 32 positions by 64, in fp32), the
    # scores of 8 experts and their gradient's factors, and the rows of 2 experts of each token: no message is repeated.
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    (alone,), (beside,) = kept(f"{fixed} off {full}"), kept(f"{fixed} on {full}")
    assert beside - alone == 2 * 32 * 4 * (2 * 64 + 2 * 8 + 2 * 64)
    stages = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --moe-layer-freq 1"
    for one, other in zip(kept(f"{fixed} off {stages}"), kept(f"{fixed} on {stages}"), strict=True):
        assert other - one == pytest.approx(of_one_layer(stages))
    # Megatron's own pairing takes as much.
    own = "--overlap-moe-expert-parallel-comm --bf16 --transformer-impl transformer_engine --lancet-plan"
    (stock,), (planned,) = kept(f"{own} off"), kept("--bf16 --transformer-impl transformer_engine " + f"{fixed} on")
    assert stock == planned


@pytest.mark.parametrize(
    ("flags", "module", "dropped_values"),
    [
        (MOE, "layernorm", {LayerKind.MOE: 64, LayerKind.DENSE: 0}),
        (f"{MOE} {LATENT}", "layernorm", {LayerKind.MOE: 2 * 64, LayerKind.DENSE: 64}),
        # Queries and keys of 16 + 8 channels and values of 20 in 4 heads, and 24 compressed ones of both.
        (f"{MOE} {LATENT}", "mla_up_proj", dict.fromkeys((LayerKind.MOE, LayerKind.DENSE), 4 * (2 * 24 + 20) + 24)),
    ],
)
def test_estimated_activations_without_recomputed_outputs(examined, flags, module, dropped_values):
    """Values per token, by kind of layer."""
    args = examined(f"{flags} --transformer-impl transformer_engine").args
    num_tokens = args.micro_batch_size * args.seq_length
    for kind, expected in dropped_values.items():
        dropped = [saved for saved in layer_tensors(args, kind, saves_scores=False) if saved.module == module]
        assert sum(saved.num_bytes for saved in dropped) == expected * num_tokens * 4


def test_estimated_activations_shrink_with_recompute(examined):
    flags = MOE + "--pipeline-model-parallel-size 2 --global-batch-size 8 --moe-ffn-hidden-size 512"
    kept = {
        name: [memory.activations for memory in examined(f"{flags} {recompute}").memory]
        for name, recompute in {
            "none": "",
            "moe": "--recompute-granularity selective --recompute-modules moe",
            "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        }.items()
    }
    first, last = ({name: activations[rank] for name, activations in kept.items()} for rank in (0, 1))
    assert first["full"] < first["moe"] < first["none"]
    assert first["full"] < first["block"] < first["none"]
    # The last stage keeps one micro-batch, and its logits.
    assert last["none"] < first["none"]
