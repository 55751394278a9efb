"""Megatron-Bridge's own ``pretrain`` on a CPU rank, stock or with the overlap: losses and norms of the steps."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.training.platform.cpu import cpu_platform
from tests.bridge import gaps

SEQ_LENGTH, MICRO_BATCH, NUM_MICRO_BATCHES, NUM_RANKS, VOCAB = 32, 4, 2, 2, 255


def provider() -> Any:
    """Bridge's description of a small model with Megatron's local layers, in fp32."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.core.transformer.enums import AttnBackend

    return GPTModelProvider(
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
        position_embedding_type="rope",
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
        moe_permute_fusion=False,
        expert_model_parallel_size=NUM_RANKS,
        transformer_layer_spec=local_layer_spec,
        attention_backend=AttnBackend.unfused,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        cross_entropy_fusion_impl="native",
        autocast_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
    )


def configuration(num_steps: int) -> Any:
    from megatron.bridge.training import config as c
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    return c.ConfigContainer(
        model=provider(),
        train=c.TrainingConfig(
            train_iters=num_steps,
            global_batch_size=MICRO_BATCH * NUM_MICRO_BATCHES * NUM_RANKS,
            micro_batch_size=MICRO_BATCH,
        ),
        validation=c.ValidationConfig(eval_interval=1000, eval_iters=0),
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
        dataset=c.MockGPTDatasetConfig(
            random_seed=1,
            seq_length=SEQ_LENGTH,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            num_dataset_builder_threads=1,
            split="9,1,0",
            dataloader_type="single",
            num_workers=0,
            skip_getting_attention_mask_from_dataset=False,
            create_attention_mask=True,
        ),
        logger=c.LoggerConfig(log_interval=1000, logging_level=logging.ERROR),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB),
        checkpoint=c.CheckpointConfig(save=None, load=None),
        rng=c.RNGConfig(seed=1),
        dist=c.DistributedInitConfig(distributed_backend="gloo", disable_jit_fuser=True),
    )


def main() -> None:
    case, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    with cpu_platform(), gaps.filled():
        from megatron.bridge.training import initialize
        from megatron.bridge.training.callbacks import Callback
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain

        from megatron_lancet.library.bridge import enable

        class Recorded(Callback):
            def __init__(self) -> None:
                self.steps: list[dict[str, Any]] = []

            def on_train_step_end(self, context: Any) -> None:
                losses = {name: value.tolist() for name, value in context.loss_dict.items()}
                self.steps.append({**losses, "norm": context.grad_norm})

            def on_train_end(self, context: Any) -> None:
                if dist.get_rank() == 0:
                    out.write_text(json.dumps(self.steps))

        # Bridge has taken it by name before the platform replaced it; the wheel of Megatron has it compiled.
        initialize.compile_helpers = lambda: None
        config = configuration(case["num_steps"])
        callbacks = [] if case["settings"] is None else enable(config, **case["settings"])
        pretrain(config, forward_step, callbacks=[Recorded(), *callbacks])


if __name__ == "__main__":
    main()
