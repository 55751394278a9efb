"""FLOP and kernels of a layer's parts are those that the virtual GPU logs for the same model."""

import sys
from collections import Counter

import pytest
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_lancet.lab.estimate.kernels import forward_of, product
from megatron_lancet.lab.estimate.layer_parts import LayerParts, Piece
from megatron_lancet.lab.modelled_step.recording import record
from megatron_lancet.lab.modelled_step.settings import modelled_run
from megatron_lancet.patching import replaced
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.testkit.virtual_gpu.log import Kernel, Mark
from megatron_lancet.testkit.virtual_gpu.playback.by_op import kernels_by_op
from megatron_lancet.training.platform.cpu import cpu_platform

MODEL = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 2 "
    "--kv-channels 32 --qk-layernorm --seq-length 512 --max-position-embeddings 512 --micro-batch-size 2 "
    "--global-batch-size 64 --train-iters 10 --lr 1e-3 --bf16 --num-experts 16 --moe-router-topk 4 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-ffn-hidden-size 128 "
    "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    "--transformer-impl local --disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --data-path /no/such_document --lancet-num-chunks 1"
).split()


@pytest.fixture(scope="module")
def logged():
    """Arguments, FLOP of each op and kernels of each op."""
    no_scale = replaced(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)  # another test's has values
    with pytest.MonkeyPatch.context() as patch, no_scale, cpu_platform():
        patch.setattr(sys, "argv", ["estimate", *MODEL])
        patch.setenv("WORLD_SIZE", "4")
        run = modelled_run()
        log = record(run.with_layers(2), run.plan).log
    flops: Counter[str] = Counter()
    since = 0
    for entry in log:
        if isinstance(entry, Kernel):
            since += entry.flops
        elif isinstance(entry, Mark):
            flops[entry.name] += since
            since = 0
    return run.args, flops, kernels_by_op(log)


def parts_of(args) -> dict[OpKind, list]:
    tokens = args.micro_batch_size * args.seq_length
    piece = Piece(tokens, args.seq_length / 2)
    return LayerParts(args, saves_scores=False).of_layer(LayerKind.MOE, piece, tokens * args.moe_router_topk)


@pytest.mark.parametrize("op", [OpKind.ATTENTION, OpKind.ROUTE])
def test_flop_of_ops_are_those_of_the_virtual_gpu(logged, op):
    args, flops, _ = logged
    counted = sum(kernel.flops for kernel in forward_of(parts_of(args)[op]))
    assert counted == pytest.approx(flops[f"L1.c0.F.{op}"], rel=0.01)


def test_flop_of_experts_are_logged_ones_and_half_a_tile_each(logged):
    args, flops, _ = logged
    counted = sum(kernel.flops for kernel in forward_of(parts_of(args)[OpKind.EXPERTS]))
    rows, local = args.micro_batch_size * args.seq_length * args.moe_router_topk, args.num_experts // 4
    assert counted == pytest.approx(flops["L1.c0.F.experts"] * (1 + 64 * local / rows), rel=0.01)


@pytest.mark.parametrize("op", [OpKind.ATTENTION, OpKind.ROUTE, OpKind.PREPROCESS, OpKind.EXPERTS, OpKind.POSTPROCESS])
def test_kernels_of_local_layers_are_those_of_the_virtual_gpu(logged, op):
    args, _, kernels = logged
    counted = sum(kernel.launches for kernel in forward_of(parts_of(args)[op]))
    assert counted == pytest.approx(kernels[f"L1.c0.F.{op}"], abs=2)


def test_a_weight_gradient_has_the_flop_of_its_product():
    part = product("weight", 10, 20, 30, 2)
    (weight,) = part.weights
    assert weight.kernel.flops == part.forward[0].flops == 2 * 10 * 20 * 30
    assert (weight.numel, weight.pinned_bytes) == (600, 10 * 50 * 2)
