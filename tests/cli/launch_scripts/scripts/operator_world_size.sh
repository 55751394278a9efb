#!/bin/bash
# A Kubernetes operator sets WORLD_SIZE to the number of pods, and RANK to the pod.
set -u
ARGS=$(cat <<FLAGS
--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512
--num-experts 16 --moe-router-topk 2 --expert-model-parallel-size 16 --moe-token-dispatcher-type alltoall
--disable-bias-linear --micro-batch-size 1 --global-batch-size 64 --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16
--tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
FLAGS
)
pip install -e . >/dev/null
nsys profile -o profile -w true --trace=cuda,nvtx --force-overwrite true \
  torchrun --nnodes $WORLD_SIZE --nproc_per_node 8 --node_rank $RANK --master_addr $MASTER_ADDR \
  --master_port $MASTER_PORT pretrain_gpt.py $ARGS
