#!/bin/bash
#SBATCH --gres=gpu:8
TP=2
EP=8
srun -N2 -n16 --export=ALL,CUDA_DEVICE_MAX_CONNECTIONS=1 bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; python pretrain_gpt.py "$@"
' _ --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 \
  --num-experts 16 --moe-router-topk 2 --tensor-model-parallel-size $TP --sequence-parallel \
  --expert-model-parallel-size $EP --moe-token-dispatcher-type alltoall --disable-bias-linear --micro-batch-size 1 \
  --global-batch-size 32 --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
