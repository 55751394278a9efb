#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
GPUS_PER_NODE=8
head_node=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export LAUNCHER="accelerate launch \
    --num_processes $((SLURM_NNODES * GPUS_PER_NODE)) --num_machines $SLURM_NNODES \
    --rdzv_backend c10d --main_process_ip $head_node --main_process_port 29500 --mixed_precision bf16 \
    "
export ARGS=" \
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 \
    --num-experts 16 --moe-router-topk 2 --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall \
    --disable-bias-linear --micro-batch-size 1 --global-batch-size 64 --lr 1e-4 --train-iters 100 --eval-interval 50 \
    --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data"
srun bash -c "$LAUNCHER --machine_rank \$SLURM_PROCID pretrain_gpt.py $ARGS"
