#!/bin/sh
# DeepSeek-V3-like: 256 routed experts, eight per token from four of eight groups, balanced by a bias, and a shared one;
# the first three of 61 layers are dense. 1024 ranks on 128 nodes: 16 pipeline stages of 64 ranks, which share the
# experts, four each. bf16, and no layer that predicts a second token: add --mtp-num-layers 1 for it.
set -eu
export NNODES="${NNODES:-128}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
export DATA_PATH="${DATA_PATH:-data/train_text_document}" CHECKPOINTS="${CHECKPOINTS-runs/deepseek_v3}"
export TOKENIZER_TYPE="${TOKENIZER_TYPE:-HuggingFaceTokenizer}" TOKENIZER="${TOKENIZER:-deepseek-ai/DeepSeek-V3}"
export VOCAB_SIZE="${VOCAB_SIZE:-129280}"

# Model
set -- --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --seq-length 4096 \
    --max-position-embeddings 4096 --position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6 --swiglu \
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
    --init-method-std 0.006 "$@"
# Multi-latent attention
set -- --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 \
    --v-head-dim 128 --kv-channels 128 --qk-layernorm --rotary-base 10000 --rotary-scaling-factor 40 --mscale 1.0 \
    --mscale-all-dim 1.0 "$@"
# Experts
set -- --num-experts 256 --moe-layer-freq '([0]*3+[1]*58)' --moe-ffn-hidden-size 2048 \
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4 \
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias \
    --moe-router-bias-update-rate 1e-3 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 \
    --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall "$@"
# Layout: four layers on a stage, one on the last, which has the output layer
set -- --pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 1 \
    --expert-model-parallel-size 64 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "$@"
# Training
set -- --micro-batch-size 1 --global-batch-size 15360 --bf16 --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine \
    --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --train-iters 250000 --split 99,1,0 \
    --eval-interval 1000 --eval-iters 4 --log-interval 1 --log-throughput --manual-gc --manual-gc-interval 10 \
    --distributed-timeout-minutes 60 "$@"
exec sh "$(dirname -- "$0")/launch.sh" "$@"
