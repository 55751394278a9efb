"""Configurations of Megatron-Bridge for small trainings on CPU ranks."""

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from tests.bridge import gaps

SEQ_LENGTH, MICRO_BATCH, NUM_MICRO_BATCHES, VOCAB = 32, 4, 2, 255
NUM_EXPERT_RANKS = 2


def configuration(case: Mapping[str, Any]) -> Any:
    """Bridge's configuration of a training, in fp32 with Megatron's local layers.

    Args:
        case: ``num_steps``; ``images``: a vision-language model, GLM-4.5V; ``virtual``: two pipeline stages with two
            virtual ones each; ``packed``: samples of documents; ``weights``: a folder of weights to begin with, and
            ``lora``: adapters are added to them; ``exits_at``: a step after which Bridge exits; ``save``, ``load``:
            folders of checkpoints, of step 2 to load.
    """
    from megatron.bridge.training import config as c
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    num_pipeline_stages = 2 if case.get("virtual") else 1
    num_steps = case["num_steps"]
    config = c.ConfigContainer(
        model=provider(case.get("images", False)),
        train=c.TrainingConfig(
            train_iters=num_steps,
            global_batch_size=MICRO_BATCH * NUM_MICRO_BATCHES * dist.get_world_size() // num_pipeline_stages,
            micro_batch_size=MICRO_BATCH,
            exit_interval=case.get("exits_at"),
        ),
        validation=c.ValidationConfig(eval_interval=2, eval_iters=1),
        optimizer=c.OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-4, use_distributed_optimizer=True, clip_grad=1.0
        ),
        scheduler=c.SchedulerConfig(
            lr_decay_style="constant",
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
            lr_warmup_iters=0,
            lr_decay_iters=num_steps,
        ),
        ddp=c.DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, grad_reduce_in_fp32=True, bucket_size=20000
        ),
        dataset=data(case),
        logger=c.LoggerConfig(log_interval=1000, logging_level=logging.ERROR),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB),
        checkpoint=c.CheckpointConfig(
            save=case.get("save"),
            save_interval=2,
            load=case.get("load"),
            ckpt_step=case.get("load") and 2,
            pretrained_checkpoint=case.get("weights"),
            async_save=False,
        ),
        rng=c.RNGConfig(seed=1),
        dist=c.DistributedInitConfig(distributed_backend="gloo", disable_jit_fuser=True),
    )
    if case.get("virtual"):
        config.model.num_layers = 4
        config.model.pipeline_model_parallel_size = num_pipeline_stages
        config.model.virtual_pipeline_model_parallel_size = 2
    if case.get("lora"):
        from megatron.bridge.peft.lora import LoRA

        config.peft = LoRA(dim=4, alpha=8)
    return config


def data(case: Mapping[str, Any]) -> Any:
    """Bridge's description of the samples."""
    from megatron.bridge.training.config import MockGPTDatasetConfig

    from tests.bridge.samples import PackedDocuments, TextsWithImages

    if case.get("packed"):
        return PackedDocuments(seq_length=SEQ_LENGTH)
    if case.get("images"):
        return TextsWithImages(seq_length=SEQ_LENGTH)
    return MockGPTDatasetConfig(
        random_seed=1,
        seq_length=SEQ_LENGTH,
        split="8,1,1",
        **gaps.SETTINGS_OF_SAMPLES,
    )


def provider(sees_images: bool) -> Any:
    """Bridge's description of the model."""
    from megatron.bridge.models.glm_vl.glm_45v_provider import GLM45VModelProvider
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    return (GLM45VModelProvider if sees_images else GPTModelProvider)(
        num_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        seq_length=SEQ_LENGTH,
        vocab_size=VOCAB,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        expert_model_parallel_size=NUM_EXPERT_RANKS,
        **gaps.settings_of_local_layers(),
        **(for_images() if sees_images else {"position_embedding_type": "rope"}),
    )


def for_images() -> dict[str, Any]:
    """The settings of a small GLM-4.5V in which it differs from a language model here, or from its own defaults."""
    from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig

    from tests.bridge.samples import IMAGE_TOKEN

    return {
        "vision_config": Glm4vVisionConfig(
            depth=1,
            hidden_size=32,
            num_heads=2,
            image_size=16,
            patch_size=4,
            out_hidden_size=64,
            intermediate_size=64,
        ),
        "image_token_id": IMAGE_TOKEN,
        "mrope_section": [2, 3, 3],
        "rotary_percent": 1.0,
        "num_query_groups": 2,
        "kv_channels": 16,
        "moe_layer_freq": 1,
        "moe_shared_expert_intermediate_size": 32,
        "moe_router_topk_scaling_factor": None,
        "moe_shared_expert_overlap": False,
        "mtp_num_layers": None,
        "bf16": False,
    }
