#!/bin/bash
#PBS -l select=4:ngpus=4
cat > hosts.txt <<HOSTS
gpu01 slots=4
gpu02 slots=4
gpu03 slots=4
gpu04 slots=4
HOSTS
export MASTER_ADDR=$(head -1 hosts.txt | cut -d' ' -f1)

mpirun -np 16 --hostfile hosts.txt --map-by ppr:4:node --bind-to none -mca btl ^openib \
    -x MASTER_ADDR -x NCCL_DEBUG=WARN -x PATH \
    apptainer exec --nv --bind /data:/data:ro,/scratch --env CUDA_DEVICE_MAX_CONNECTIONS=1 /images/megatron.sif \
    bash -c 'export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK
             python pretrain_gpt.py "$@"' train \
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 \
    --num-experts 16 --moe-router-topk 2 --expert-model-parallel-size 16 --moe-token-dispatcher-type alltoall \
    --disable-bias-linear --micro-batch-size 1 --global-batch-size 32 --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16 \
    --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
