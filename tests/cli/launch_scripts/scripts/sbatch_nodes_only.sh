#!/usr/bin/env bash
#
#SBATCH --nodes 8
#SBATCH --output=%x.out

##SBATCH --nodes=2

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${SLURM_NNODES:-1}
HEAD=${MASTER_ADDR:-localhost}

MODEL="--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512
  --max-position-embeddings 512 --num-experts 64 --moe-router-topk 2
  --expert-model-parallel-size 64 --moe-token-dispatcher-type alltoall --disable-bias-linear"
TRAIN="--micro-batch-size 1 --global-batch-size 128 --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16
  --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data"

srun torchrun --nproc-per-node=$GPUS_PER_NODE --nnodes=$NNODES --rdzv-backend=c10d \
  --rdzv-endpoint=$HEAD:29400 --rdzv-id=$RANDOM \
  pretrain_gpt.py $MODEL $TRAIN
