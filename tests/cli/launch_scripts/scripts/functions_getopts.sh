#!/bin/bash
set -euo pipefail
usage() { echo "usage: $0 [-s small|large] [-n nodes] [-e]"; exit 64; }

size=small nodes=1 elastic=no
while getopts "s:n:eh" opt; do
    case $opt in
        s) size=$OPTARG ;;
        n) nodes=$OPTARG ;;
        e) elastic=yes ;;
        *) usage ;;
    esac
done
shift $((OPTIND - 1))

model_flags() {
    local -A layers=([small]=4 [large]=8)
    local experts
    case $1 in
        small) experts=16 ;;
        large) experts=32 ;;
        *) usage ;;
    esac
    echo --num-layers "${layers[$1]}" --hidden-size 256 --num-attention-heads 8 --seq-length 512 \
         --max-position-embeddings 512 --num-experts "$experts" --moe-router-topk 2 \
         --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --disable-bias-linear
}
launch() {
    local range=$nodes
    [[ $elastic == yes ]] && range=1:$nodes
    ( set -x
      torchrun --nnodes "$range" --nproc-per-node gpu --max-restarts 3 --tee 3 --log-dir "${TMPDIR:-/tmp}/logs" "$@" )
}
launch pretrain_gpt.py $(model_flags "$size") --micro-batch-size 1 --global-batch-size 96 --lr 1e-4 \
    --train-iters 100 --eval-interval 50 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data "$@"
