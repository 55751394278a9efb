#!/bin/bash -l
#PBS -N moe
#PBS -l select=4:ncpus=64:ngpus=8:mem=480gb
#PBS -l place=scatter:excl,walltime=06:00:00
#PBS -q prod
cd ${PBS_O_WORKDIR}
module use /soft/modulefiles; module load conda; conda activate base

NNODES=$(sort -u "$PBS_NODEFILE" | wc -l)
NGPUS_PER_NODE=$(nvidia-smi -L | wc -l)
NTOTRANKS=$((NNODES * NGPUS_PER_NODE))
export MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE") MASTER_PORT=29400
export CUDA_DEVICE_MAX_CONNECTIONS=1
echo "$NNODES nodes, $NTOTRANKS ranks, job ${PBS_JOBID%%.*}"

mpiexec --verbose --envall -n "$NNODES" --ppn 1 --hostfile="$PBS_NODEFILE" --cpu-bind depth -d 64 \
    torchrun --nnodes "$NNODES" --nproc-per-node "$NGPUS_PER_NODE" --rdzv-backend c10d \
    --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "$PBS_JOBID" \
    pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 \
    --max-position-embeddings 512 --num-experts 32 --moe-router-topk 2 --expert-model-parallel-size 32 \
    --moe-token-dispatcher-type alltoall --disable-bias-linear --micro-batch-size 1 --global-batch-size 64 \
    --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
