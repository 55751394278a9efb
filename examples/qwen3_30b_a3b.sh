#!/bin/sh
# Qwen3-30B-A3B-like: 128 small experts, eight per token, in every layer: much to send and little to compute. 32 ranks
# on 4 nodes. 16 ranks share the experts, so half of each all-to-all crosses nodes; full recompute repeats none.
set -eu
export NNODES="${NNODES:-4}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
export DATA_PATH="${DATA_PATH:-data/train_text_document}" CHECKPOINTS="${CHECKPOINTS-runs/qwen3_30b_a3b}"
export TOKENIZER_TYPE="${TOKENIZER_TYPE:-HuggingFaceTokenizer}" TOKENIZER="${TOKENIZER:-Qwen/Qwen3-30B-A3B}"
export VOCAB_SIZE="${VOCAB_SIZE:-151936}"

# Model
set -- --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention \
    --num-query-groups 4 --kv-channels 128 --qk-layernorm --seq-length 4096 --max-position-embeddings 40960 \
    --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu \
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
    --init-method-std 0.02 "$@"
# Experts
set -- --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-router-load-balancing-type aux_loss \
    --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall "$@"
# Layout: eight experts on each rank
set -- --expert-model-parallel-size 16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "$@"
# Training
set -- --micro-batch-size 2 --global-batch-size 256 --bf16 --lr 1.2e-4 --min-lr 1.2e-5 --lr-decay-style cosine \
    --lr-warmup-iters 500 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --train-iters 100000 --split 98,1,1 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput --manual-gc --manual-gc-interval 100 "$@"
exec sh "$(dirname -- "$0")/launch.sh" "$@"
