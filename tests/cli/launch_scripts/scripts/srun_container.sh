#!/bin/bash
#SBATCH -A research -p batch -N 4
#SBATCH --ntasks-per-node=8 --gpus-per-node=8
#SBATCH --exclusive --mem=0
#SBATCH -t 04:00:00 --dependency=singleton

IMAGE=/lustre/images/pytorch-25.04.sqsh
MOUNTS=/lustre:/lustre,$PWD:/workspace
DIR=/workspace/megatron

options=" \
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 \
    --max-position-embeddings 512 --num-experts 16 --moe-router-topk 2 \
    --expert-model-parallel-size 8 --tensor-model-parallel-size 2 --sequence-parallel \
    --moe-token-dispatcher-type alltoall --disable-bias-linear \
    --micro-batch-size 1 --global-batch-size 64 --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16 \
    --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data"

run_cmd="cd $DIR && python -u pretrain_gpt.py ${options}"

srun -l --container-image "$IMAGE" --container-mounts="$MOUNTS" --no-container-mount-home \
     --output=$DIR/logs/%x_%j.log sh -c "${run_cmd}"
