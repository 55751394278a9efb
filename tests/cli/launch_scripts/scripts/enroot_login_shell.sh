#!/bin/bash
#SBATCH --ntasks=32 --ntasks-per-node=4
enroot import -o megatron.sqsh docker://nvcr.io#nvidia/pytorch:25.04-py3
enroot create --name megatron megatron.sqsh

cat <<'FLAGS' > flags.txt
--num-layers 4 --hidden-size 256 --num-attention-heads 8
--seq-length 512 --max-position-embeddings 512
--num-experts 16 --moe-router-topk 2 --expert-model-parallel-size 16
--moe-token-dispatcher-type alltoall --disable-bias-linear
--micro-batch-size 1 --global-batch-size 64 --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16
--tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
FLAGS
srun enroot start --root --rw -m "$PWD:/code" -e NCCL_DEBUG=WARN megatron \
    bash -l -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS python3.12 -u /code/pretrain_gpt.py $(< flags.txt)'
