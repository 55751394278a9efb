#!/bin/bash
# Starts a torchrun on each host by ssh, from the first of them.
set -euo pipefail
HOSTS=(gpu-a gpu-b gpu-c)
export NCCL_DEBUG=INFO   # for this shell alone: the hosts do not get it
FLAGS="--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512
 --num-experts 24 --moe-router-topk 2 --expert-model-parallel-size 24 --moe-token-dispatcher-type alltoall
 --disable-bias-linear --micro-batch-size 1 --global-batch-size 48 --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16
 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data"
for host in "${HOSTS[@]}"; do ssh "$host" 'pkill -f pretrain_gpt || true'; done
for rank in "${!HOSTS[@]}"; do
  ssh -o StrictHostKeyChecking=no -p 2222 "${HOSTS[$rank]}" "
    cd $PWD && source /opt/venv/bin/activate 2>/dev/null
    export CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_SOCKET_IFNAME=ib0
    nohup torchrun --nnodes ${#HOSTS[@]} --node_rank $rank --nproc_per_node 8 \
      --master_addr ${HOSTS[0]} --master_port 29500 pretrain_gpt.py ${FLAGS//$'\n'/ }" > "log.$rank" 2>&1 &
done
wait
