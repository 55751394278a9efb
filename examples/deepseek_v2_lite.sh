#!/bin/sh
# DeepSeek-V2-Lite-like: multi-latent attention, 64 routed experts, six per token, and two shared ones, which compute
# while tokens travel; the first layer is dense. 16 ranks on 2 nodes share the experts: every all-to-all crosses nodes.
set -eu
export NNODES="${NNODES:-2}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
export DATA_PATH="${DATA_PATH:-data/train_text_document}" CHECKPOINTS="${CHECKPOINTS-runs/deepseek_v2_lite}"
export TOKENIZER_TYPE="${TOKENIZER_TYPE:-HuggingFaceTokenizer}" TOKENIZER="${TOKENIZER:-deepseek-ai/DeepSeek-V2-Lite}"
export VOCAB_SIZE="${VOCAB_SIZE:-102400}"

# Model
set -- --num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --seq-length 4096 \
    --max-position-embeddings 4096 --position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6 --swiglu \
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
    --init-method-std 0.02 "$@"
# Multi-latent attention; queries are not compressed, and without that Megatron's local layers have no --qk-layernorm
[ "${LAYERS:-}" = local ] || set -- --qk-layernorm "$@"
set -- --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 \
    --kv-channels 128 --rotary-base 10000 --rotary-scaling-factor 40 --mscale 0.707 \
    --mscale-all-dim 0.707 "$@"
# Experts
set -- --num-experts 64 --moe-layer-freq '([0]+[1]*26)' --moe-ffn-hidden-size 1408 \
    --moe-shared-expert-intermediate-size 2816 --moe-router-topk 6 --moe-router-pre-softmax \
    --moe-router-topk-scaling-factor 1.0 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 \
    --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall "$@"
# Layout: four experts on each rank
set -- --expert-model-parallel-size 16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --recompute-granularity selective --recompute-modules core_attn "$@"
# Training
set -- --micro-batch-size 1 --global-batch-size 512 --bf16 --lr 4.2e-4 --min-lr 4.2e-5 --lr-decay-style cosine \
    --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --train-iters 100000 --split 98,1,1 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput --manual-gc --manual-gc-interval 100 "$@"
exec sh "$(dirname -- "$0")/launch.sh" "$@"
