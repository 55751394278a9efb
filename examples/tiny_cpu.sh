#!/bin/sh
# A tiny GPT-MoE on two CPU ranks with expert parallelism, on Megatron's mock data: the smallest complete launch script.
# Runs from anywhere, in about 20 seconds. Further arguments are passed on, for example: --lancet-plan off
set -eu
export NNODES="${NNODES:-1}" GPUS_PER_NODE="${GPUS_PER_NODE:-2}" LAYERS="${LAYERS:-local}"
export DATA_PATH=mock VOCAB_SIZE=1000
export CUDA_VISIBLE_DEVICES=  # else ranks take GPUs, and one GPU is too few for both

set -- --num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 \
    --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "$@"
set -- --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall \
    --expert-model-parallel-size 2 "$@"
set -- --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 --train-iters 20 --eval-interval 1000 --eval-iters 0 \
    --log-interval 5 "$@"
exec sh "$(dirname -- "$0")/launch.sh" "$@"
