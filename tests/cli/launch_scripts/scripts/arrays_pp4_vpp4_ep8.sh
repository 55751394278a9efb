#!/bin/bash
#SBATCH --nodes=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive

set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_IB_TIMEOUT=22

DISTRIBUTED=(
    --nnodes "${SLURM_NNODES:-8}"
    --nproc-per-node "${SLURM_GPUS_PER_NODE:-8}"
    --rdzv-id "$SLURM_JOB_ID"
    --rdzv-backend c10d
    --rdzv-endpoint "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1):29500"
)
MODEL=(
    --num-layers 32 --hidden-size 256 --num-attention-heads 8
    --seq-length 512 --max-position-embeddings 512   # short: a test
    --disable-bias-linear
)
MOE=(
    --num-experts 8
    --moe-router-topk 2
    --moe-token-dispatcher-type alltoall
)
PARALLEL=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 4
    --expert-model-parallel-size 8
    --use-distributed-optimizer
)
PARALLEL[5]=2
TRAINING=(
    --micro-batch-size 1 --global-batch-size 256
    --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16
    --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
)
if [[ -n "${WANDB_API_KEY:-}" ]]; then
    TRAINING+=(--wandb-project "${WANDB_PROJECT}")
fi

srun torchrun "${DISTRIBUTED[@]}" pretrain_gpt.py "${MODEL[@]}" "${MOE[@]}" "${PARALLEL[@]}" "${TRAINING[@]}"
