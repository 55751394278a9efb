#!/bin/bash
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$HERE/cluster.env"
module load cuda/12.8 || true
. "$HERE/cluster.env" quiet

exec python3 -u -m torch.distributed.run \
    --nnodes=$NUM_NODES --nproc_per_node $GPUS --node_rank=${NODE_RANK:-0} --master_addr $HEAD_NODE \
    -m megatron_pretrain $(sed 's/#.*//; s/\\$//' "$HERE/module_env_file.args") "$@"
