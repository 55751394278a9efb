"""Warns of files and packages that a run needs and this machine lacks; the cluster may have them."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron.core.transformer.enums import AttnBackend

from megatron_lancet.lab.dry_run.cluster import has_package

TOKENIZER_PACKAGES = {
    "HuggingFaceTokenizer": "transformers",
    "GPT2BPETokenizer": "transformers",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
}
"""The package that each of Megatron's tokenizers needs."""


def missing_packages(args: argparse.Namespace) -> Iterator[str]:
    """Yields a message for each package that validated arguments ask for and that is not installed."""
    for package, reason in _needed_packages(args):
        if not has_package(package):
            yield f"{package} is not installed here; {reason} needs it"


def _needed_packages(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yields the packages that the run must be able to import, each with the flag that asks for it."""
    if args.transformer_impl == "transformer_engine":
        yield "transformer_engine", "--transformer-impl transformer_engine (Megatron's default)"
    if args.gradient_accumulation_fusion:
        # Megatron's own output layer has it, whatever the other layers are.
        yield (
            "fused_weight_gradient_mlp_cuda",
            "gradient accumulation fusion (part of NVIDIA apex; else pass --no-gradient-accumulation-fusion)",
        )
    if args.transformer_impl == "local":
        # Kernels that Megatron's local modules use by default, and do not run without.
        if args.normalization == "LayerNorm" and not args.no_persist_layer_norm and not args.sequence_parallel:
            yield "apex", "the persistent layer norm (else pass --no-persist-layer-norm)"
        rotates = args.position_embedding_type == "rope" and not args.multi_latent_attention
        if rotates and args.apply_rope_fusion:
            yield "transformer_engine", "the fused rotary embedding (else pass --no-rope-fusion)"
        if args.moe_router_fusion:
            yield "transformer_engine", "--moe-router-fusion"
    if args.use_flash_attn or args.attention_backend == AttnBackend.flash:
        yield "flash_attn", "flash attention"
    dispatcher = args.moe_token_dispatcher_type
    if dispatcher == "flex" and args.moe_flex_dispatcher_backend == "deepep":
        yield "deep_ep", "--moe-flex-dispatcher-backend deepep"
    package = TOKENIZER_PACKAGES.get(args.tokenizer_type)
    if package is not None:
        yield package, f"--tokenizer-type {args.tokenizer_type}"
    if args.wandb_project:
        yield "wandb", "--wandb-project"
    if args.tensorboard_dir:
        yield "tensorboard", "--tensorboard-dir"
    if args.non_persistent_ckpt_type == "local" or (args.async_save and args.async_strategy == "nvrx"):
        yield "nvidia_resiliency_ext", "--async-save or a local checkpoint"


def missing_inputs(args: argparse.Namespace) -> Iterator[str]:
    """Yields a message for each missing file of a byte-pair tokenizer and each missing folder of a checkpoint."""
    for flag, path in (("--vocab-file", args.vocab_file), ("--merge-file", args.merge_file)):
        if path is not None and not Path(path).is_file():
            yield f"{flag}: no such file: {path}"
    for flag, folder in (("--load", args.load), ("--pretrained-checkpoint", args.pretrained_checkpoint)):
        if folder is not None and "://" not in folder and not Path(folder).is_dir():
            yield f"{flag}: no such folder: {folder}"


def unknown_sizes(args: argparse.Namespace) -> Iterator[str]:
    """Yields a message for each setting whose effect on sizes is not estimated."""
    for flag, is_given in {
        "--experimental-attention-variant": args.experimental_attention_variant,
        "--heterogeneous-layers-config-path": args.heterogeneous_layers_config_path,
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
        "--tensor-parallel-num-weight-shards": args.gtp_weight_remat_size > 1,
        "--expert-tensor-parallel-num-weight-shards": args.expert_gtp_weight_remat_size > 1,
        "--cpu-offloading-num-layers": args.cpu_offloading_num_layers > 0,
        "--fine-grained-activation-offloading": args.fine_grained_activation_offloading,
    }.items():
        if is_given:
            yield f"sizes and memory are those without {flag}: its effect is not estimated"
