#!/bin/sh
# A tiny GPT-MoE on two CPU ranks with expert parallelism, on Megatron's mock data: the smallest complete launch script.
# Runs from anywhere, in about 20 seconds. Further arguments are passed on, for example: --lancet-plan off
set -eu
cd "$(dirname "$0")/.."

torchrun=torchrun
[ ! -x .venv/bin/torchrun ] || torchrun=.venv/bin/torchrun

OMP_NUM_THREADS=1 exec "$torchrun" --standalone --nproc-per-node 2 pretrain_gpt_moe.py \
    --num-layers 2 \
    --hidden-size 128 \
    --num-attention-heads 4 \
    --seq-length 128 \
    --max-position-embeddings 128 \
    --num-experts 8 \
    --moe-router-topk 2 \
    --moe-token-dispatcher-type alltoall \
    --moe-aux-loss-coeff 1e-2 \
    --expert-model-parallel-size 2 \
    --hidden-dropout 0 \
    --attention-dropout 0 \
    --disable-bias-linear \
    --micro-batch-size 4 \
    --global-batch-size 8 \
    --train-iters 20 \
    --lr 1e-3 \
    --eval-interval 1000 \
    --eval-iters 0 \
    --log-interval 5 \
    --mock-data \
    --tokenizer-type NullTokenizer \
    --vocab-size 1000 \
    "$@"
