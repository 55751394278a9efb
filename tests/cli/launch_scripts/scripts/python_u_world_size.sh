#!/bin/bash
# Every rank runs this script: the platform's agent starts it, and sets RANK.
set -e
export WORLD_SIZE=1024
export RANK=${RANK:-0} LOCAL_RANK=${LOCAL_RANK:-0}
export MASTER_ADDR=${MASTER_ADDR:=trainer-0} MASTER_PORT=23456
export CUDA_DEVICE_MAX_CONNECTIONS=1

python -u -X faulthandler pretrain_gpt.py \
  --num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 \
  --num-experts 64 --moe-router-topk 4 --expert-model-parallel-size 64 --pipeline-model-parallel-size 8 \
  --moe-token-dispatcher-type alltoall --disable-bias-linear \
  --micro-batch-size 1 --global-batch-size 2048 --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
