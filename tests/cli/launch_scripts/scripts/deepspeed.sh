#!/bin/bash
NODES=2; GPUS=8
gpt_options=" \
       --num-layers 4 \
       --hidden-size 256 \
       --num-attention-heads 8 \
       --seq-length 512 \
       --max-position-embeddings 512 \
       --num-experts 16 \
       --moe-router-topk 2 \
       --expert-model-parallel-size 8 \
       --moe-token-dispatcher-type alltoall \
       --disable-bias-linear \
       --micro-batch-size 1 \
       --global-batch-size 32 \
       --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16 \
       --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
"
run_cmd="deepspeed --num_nodes ${NODES} --num_gpus ${GPUS} --master_port 29511 pretrain_gpt.py $@ ${gpt_options}"
echo ${run_cmd}
eval ${run_cmd}
