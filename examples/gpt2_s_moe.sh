#!/bin/sh
# GPT2-S-MoE of the Lancet paper (section 7): 12 layers of 768, every other one with two experts per GPU, of which a
# token takes one (Switch). No token is dropped here. 16 ranks on 2 nodes; with NNODES=4 it has twice the experts.
set -eu
export NNODES="${NNODES:-2}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}" LAYERS="${LAYERS:-local}"
export DATA_PATH="${DATA_PATH:-data/train_text_document}" CHECKPOINTS="${CHECKPOINTS-runs/gpt2_s_moe}"
export TOKENIZER_TYPE="${TOKENIZER_TYPE:-SentencePieceTokenizer}" TOKENIZER="${TOKENIZER:-data/tokenizer.model}"
export VOCAB_SIZE="${VOCAB_SIZE:-50257}"
ranks=$((NNODES * GPUS_PER_NODE))

# Model
set -- --num-layers 12 --hidden-size 768 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 \
    --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "$@"
[ "$LAYERS" != local ] || set -- --lancet-attention sdpa "$@"
# Experts: as many ranks share them as there are, so every all-to-all crosses nodes
set -- --num-experts "$((2 * ranks))" --moe-layer-freq '([0,1]*6)' --expert-model-parallel-size "$ranks" \
    --moe-router-topk 1 --moe-router-pre-softmax --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 \
    --moe-token-dispatcher-type alltoall "$@"
# Training: the paper's batch per GPU and its optimizer
set -- --micro-batch-size 48 --global-batch-size "$((48 * ranks))" --bf16 --overlap-grad-reduce \
    --optimizer sgd --sgd-momentum 0.9 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 500 \
    --clip-grad 1.0 --train-iters 20000 --split 98,1,1 --eval-interval 1000 --eval-iters 20 --log-interval 10 \
    --log-throughput "$@"
exec sh "$(dirname -- "$0")/launch.sh" "$@"
