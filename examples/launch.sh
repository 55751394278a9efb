#!/bin/sh
# Starts this node's ranks of pretrain_gpt_moe.py: launch.sh MEGATRON-ARGUMENTS...
# Every example ends here. With --lancet-dry-run among the arguments one process checks them, and no rank starts.
#
#   NNODES, GPUS_PER_NODE   nodes, and ranks on each (1, 8)
#   RDZV_ENDPOINT, RDZV_ID  where nodes meet: HOST:PORT of one of them, and a word; both the same on all (-, run)
#   LOG_DIR                 rank N appends what it prints to LOG_DIR/rank_N.log; unset: to the terminal
#   DATA_PATH               prefix of a token data set (lancet data encode), or mock
#   TOKENIZER_TYPE, TOKENIZER   Megatron's --tokenizer-type and --tokenizer-model; not needed with mock
#   VOCAB_SIZE              of the tokenizer
#   CHECKPOINTS             folder to save to, and to go on from if there is a checkpoint; empty: neither
#   SAVE_INTERVAL           steps from one checkpoint to the next (500)
#   LAYERS                  transformer_engine, with its grouped experts and apex; or local: packages from PyPI are enough
#   PYTHON                  interpreter (this checkout's .venv, else python3)
#   CUDA_DEVICE_MAX_CONNECTIONS, PYTORCH_ALLOC_CONF   of CUDA and torch (32, expandable_segments:True): docs/gpus.md
#   NVTE_USE_CUTLASS_GROUPED_GEMM   of Transformer Engine (1)
# To keep Megatron's check for NaN, delete the line with --no-check-for-nan-in-loss-and-grad.
set -eu
root=$(CDPATH='' cd -P -- "$(dirname -- "$0")/.." && pwd)
nodes=${NNODES:-1}
ranks_per_node=${GPUS_PER_NODE:-8}
python=${PYTHON:-python3}
[ -n "${PYTHON:-}" ] || [ ! -x "$root/.venv/bin/python" ] || python=$root/.venv/bin/python

# With fewer queues to the GPU than streams, some all-to-alls start behind another stream's kernels.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}"
# Experts' tensors have other sizes in every step, which cuts free memory into pieces too small to be of use.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

# What the user gave stays behind all of this: of two equal flags Megatron takes the last.
if [ "$DATA_PATH" = mock ]; then
    set -- --mock-data --tokenizer-type NullTokenizer --vocab-size "$VOCAB_SIZE" "$@"
else
    set -- --data-path "$DATA_PATH" --tokenizer-type "$TOKENIZER_TYPE" --tokenizer-model "$TOKENIZER" \
        --vocab-size "$VOCAB_SIZE" "$@"
fi
if [ -n "${CHECKPOINTS:-}" ]; then
    # At SIGTERM all ranks finish their step, save and leave.
    set -- --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval "${SAVE_INTERVAL:-500}" \
        --exit-signal-handler "$@"
fi
if [ "${LAYERS:-transformer_engine}" = local ]; then
    # Each of these flags turns off a kernel of Transformer Engine or apex.
    set -- --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm \
        --no-masked-softmax-fusion --no-rope-fusion "$@"
else
    set -- --transformer-impl transformer_engine --moe-grouped-gemm "$@"
    # On Hopper one kernel multiplies the rows of all experts in forward and dX; otherwise each expert has a kernel. A dW
    # always has one for each expert.
    export NVTE_USE_CUTLASS_GROUPED_GEMM="${NVTE_USE_CUTLASS_GROUPED_GEMM:-1}"
fi
# Megatron's check of each gradient makes the host wait for the device inside the backward pass, between two messages.
set -- --no-check-for-nan-in-loss-and-grad "$@"

for argument in "$@"; do
    [ "$argument" != --lancet-dry-run ] ||
        exec "$python" "$root/pretrain_gpt_moe.py" --lancet-world-size "$((nodes * ranks_per_node))" "$@"
done

set -- "$root/pretrain_gpt_moe.py" "$@"
if [ -n "${LOG_DIR:-}" ]; then
    mkdir -p "$LOG_DIR"
    export LOG_DIR
    # shellcheck disable=SC2016 # expanded on the rank
    set -- --no-python sh -c 'exec "$@" >>"$LOG_DIR/rank_$(printf %04d "$RANK").log" 2>&1' rank "$python" "$@"
fi
if [ "$nodes" -eq 1 ]; then
    set -- --standalone "$@"
else
    : "${RDZV_ENDPOINT:?NNODES is $nodes: set it to HOST:PORT of one node on all of them, or submit the example with \
examples/slurm/train.sbatch, or try one node with NNODES=1}"
    set -- --nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "${RDZV_ID:-run}" "$@"
fi
# torchrun would set it to 1, too, but not without a warning.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m torch.distributed.run --nproc-per-node "$ranks_per_node" "$@"
