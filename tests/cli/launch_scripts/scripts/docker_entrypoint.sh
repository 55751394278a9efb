#!/bin/sh
# One container a node; the other nodes run the same with NODE_RANK set.
FLAGS="--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512"
FLAGS="$FLAGS --num-experts 16 --moe-router-topk 2 --expert-model-parallel-size 16"
FLAGS="$FLAGS --moe-token-dispatcher-type alltoall --disable-bias-linear --micro-batch-size 1 --global-batch-size 32"
FLAGS="$FLAGS --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data"

docker pull nvcr.io/nvidia/pytorch:25.04-py3
docker run -it --rm --gpus all --ipc=host --network host --ulimit memlock=-1 --shm-size 64g --name python \
    -e NCCL_DEBUG=INFO --env CUDA_DEVICE_MAX_CONNECTIONS=1 -v "$PWD":/workspace -w /workspace \
    --entrypoint /bin/bash nvcr.io/nvidia/pytorch:25.04-py3 \
    -lc "pip install -q sentencepiece && torchrun --nnodes 2 --nproc_per_node 8 \
         --node_rank ${NODE_RANK:-0} --master_addr ${MASTER_ADDR:-node0} /workspace/pretrain_gpt.py $FLAGS"
