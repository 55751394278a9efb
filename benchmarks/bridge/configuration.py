"""Megatron-Bridge's configuration of the model, the data and the training of :mod:`benchmarks.auto`."""

import argparse
import logging
from pathlib import Path
from typing import Any

import torch

from benchmarks.auto.training import SAMPLES_PER_RANK
from benchmarks.bridge.variants import EXPERTS, MICRO_BATCHES, TOPK
from benchmarks.harness.namespaces import NUM_NODES
from tests.bridge import gaps

SEQ_LENGTH = 256
_NUM_STEPS = 10_000
"""More than are run: the ranks end when their parent ends them."""


def model() -> Any:
    """Megatron's local layers in fp32, as ``MODEL_FLAGS`` of :mod:`benchmarks.auto.training` describe them."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core.utils import init_method_normal

    return GPTModelProvider(
        num_layers=3,
        hidden_size=256,
        ffn_hidden_size=576,
        num_attention_heads=4,
        seq_length=SEQ_LENGTH,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
        init_method=init_method_normal(0.04),
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_ffn_hidden_size=576,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_z_loss_coeff=1e-3,
        expert_model_parallel_size=NUM_NODES,
        **gaps.settings_of_local_layers(),
    )


def configuration(args: argparse.Namespace) -> Any:
    """Returns the ``ConfigContainer`` of a rank.

    Args:
        args: command line of :mod:`benchmarks.bridge.rank`.
    """
    from megatron.bridge.training import config as c
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    return c.ConfigContainer(
        model=model(),
        train=c.TrainingConfig(
            train_iters=_NUM_STEPS,
            global_batch_size=SAMPLES_PER_RANK * MICRO_BATCHES * NUM_NODES,
            micro_batch_size=SAMPLES_PER_RANK,
        ),
        validation=c.ValidationConfig(eval_interval=_NUM_STEPS + 1, eval_iters=0),
        optimizer=c.OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-3, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0
        ),
        scheduler=c.SchedulerConfig(
            lr_decay_style="constant",
            start_weight_decay=0.1,
            end_weight_decay=0.1,
            weight_decay_incr_style="constant",
            lr_warmup_iters=0,
            lr_decay_iters=_NUM_STEPS,
        ),
        ddp=c.DistributedDataParallelConfig(),
        dataset=_data(c, args.data, args.cache),
        logger=c.LoggerConfig(log_interval=_NUM_STEPS + 1, logging_level=logging.ERROR),
        tokenizer=TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(args.tokenizer)),
        checkpoint=c.CheckpointConfig(save=None, load=None),
        rng=c.RNGConfig(seed=1234),
        dist=c.DistributedInitConfig(distributed_backend="gloo", disable_jit_fuser=True),
    )


def _data(config: Any, prefix: Path, cache: Path) -> Any:
    return config.GPTDatasetConfig(
        random_seed=1234,
        seq_length=SEQ_LENGTH,
        blend=([str(prefix)], None),
        path_to_cache=str(cache),
        split="99,1,0",
        **gaps.SETTINGS_OF_SAMPLES,
    )
