#!/bin/sh
# Mixtral 8x7B-like: 8 experts, two per token, in every layer. 64 ranks on 8 nodes: 4 pipeline stages, each with the 8
# experts on 8 ranks, twice. All-to-alls stay inside a node; micro-batches of one sample are cut along the sequence.
set -eu
export NNODES="${NNODES:-8}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
export DATA_PATH="${DATA_PATH:-data/train_text_document}" CHECKPOINTS="${CHECKPOINTS-runs/mixtral_8x7b}"
export TOKENIZER_TYPE="${TOKENIZER_TYPE:-SentencePieceTokenizer}" TOKENIZER="${TOKENIZER:-data/tokenizer.model}"
export VOCAB_SIZE="${VOCAB_SIZE:-32000}"

# Model
set -- --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention \
    --num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768 --position-embedding-type rope \
    --rotary-base 1000000 --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear \
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.01 "$@"
# Experts
set -- --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 \
    --moe-token-dispatcher-type alltoall "$@"
# Layout: one expert on each rank of a node
set -- --expert-model-parallel-size 8 --pipeline-model-parallel-size 4 --use-distributed-optimizer \
    --overlap-grad-reduce --overlap-param-gather "$@"
# Training
set -- --micro-batch-size 1 --global-batch-size 256 --bf16 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine \
    --lr-warmup-iters 500 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --train-iters 100000 --split 98,1,1 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput --manual-gc --manual-gc-interval 100 "$@"
exec sh "$(dirname -- "$0")/launch.sh" "$@"
