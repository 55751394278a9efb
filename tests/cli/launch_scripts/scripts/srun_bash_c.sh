#!/bin/bash
#SBATCH --nodes=16
#SBATCH --ntasks=128
#SBATCH --cpus-per-task=12
#SBATCH --gpus-per-task=1
set -eux
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export WORLD_SIZE=$SLURM_NTASKS
export MASTER_ADDR=$(srun --nodes=1 --ntasks=1 hostname --ip-address)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 50000))
export ARGS="--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 512 \
  --max-position-embeddings 512 --num-experts 64 --moe-router-topk 8 --moe-router-score-function sigmoid \
  --pipeline-model-parallel-size 2 --expert-model-parallel-size 32 --moe-token-dispatcher-type alltoall \
  --disable-bias-linear --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data"

srun --cpu-bind=none bash -c "
    set -u
    export RANK=\$SLURM_PROCID LOCAL_RANK=\$SLURM_LOCALID
    echo \"rank \$RANK of \$SLURM_NTASKS on node \$SLURM_NODEID\"
    exec numactl --cpunodebind=\$((LOCAL_RANK / 4)) --membind=\$((LOCAL_RANK / 4)) \
        python -u pretrain_gpt.py $ARGS
"
