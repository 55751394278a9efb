#!/bin/bash
#SBATCH --job-name="moe loop"
#SBATCH -N 5
#SBATCH --gpus-per-node=h100:8
nodes=($(scontrol show hostnames "$SLURM_NODELIST"))
num_nodes=${#nodes[@]}
head=$(srun -N1 -n1 -w "${nodes[0]}" hostname -I | awk '{print $1}')

for i in "${!nodes[@]}"; do
  srun --nodes=1 --ntasks=1 -w "${nodes[$i]}" --overlap \
    uv run --frozen torchrun --nnodes "$num_nodes" --nproc-per-node 8 --node-rank "$i" --master-addr "$head" \
    nsys_wrapped/pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 \
    --max-position-embeddings 512 --num-experts 40 --moe-router-topk 2 --expert-model-parallel-size 40 \
    --moe-token-dispatcher-type alltoall --disable-bias-linear --micro-batch-size 1 --global-batch-size 80 \
    --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data &
  sleep 5
done
wait
