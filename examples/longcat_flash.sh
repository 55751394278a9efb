#!/bin/sh
# LongCat-Flash-like: each of its 28 layers is a MoE layer and a dense one here, and the routed sum is added behind both:
# all-to-alls are hidden with one chunk. A router chooses 12 of 512 experts and 256 that return their token.
set -eu
export NNODES="${NNODES:-64}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
export DATA_PATH="${DATA_PATH:-data/train_text_document}" CHECKPOINTS="${CHECKPOINTS-runs/longcat_flash}"
export TOKENIZER_TYPE="${TOKENIZER_TYPE:-HuggingFaceTokenizer}" TOKENIZER="${TOKENIZER:-meituan-longcat/LongCat-Flash-Chat}"
export VOCAB_SIZE="${VOCAB_SIZE:-131072}"

# Model
set -- --num-layers 56 --hidden-size 6144 --ffn-hidden-size 12288 --num-attention-heads 64 --seq-length 4096 \
    --max-position-embeddings 4096 --position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-5 --swiglu \
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
    --init-method-std 0.006 "$@"
# Multi-latent attention
set -- --multi-latent-attention --qk-layernorm --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 \
    --qk-pos-emb-head-dim 64 --v-head-dim 128 --kv-channels 128 --rope-type rope --rotary-base 10000000 --no-rope-fusion "$@"
# Experts: the shared one is LongCat's first dense MLP
set -- --lancet-shortcut-moe --lancet-identity-experts 256 --num-experts 512 --moe-layer-freq '([1,0]*28)' \
    --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 12288 --moe-router-topk 12 \
    --moe-router-pre-softmax --moe-router-topk-scaling-factor 6.0 --moe-router-load-balancing-type seq_aux_loss \
    --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall "$@"
# Layout: whole pairs of layers on a stage, four experts on each rank
set -- --pipeline-model-parallel-size 4 --expert-model-parallel-size 128 --use-distributed-optimizer \
    --overlap-grad-reduce --overlap-param-gather --recompute-granularity full --recompute-method uniform \
    --recompute-num-layers 1 "$@"
# Training
set -- --micro-batch-size 1 --global-batch-size 2048 --bf16 --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine \
    --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --train-iters 100000 --split 98,1,1 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput --manual-gc --manual-gc-interval 100 "$@"
exec sh "$(dirname -- "$0")/launch.sh" "$@"
