#!/bin/bash
#SBATCH --job-name=moe-16x
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1        # torchrun starts the ranks
#SBATCH --gres=gpu:h100:8
#SBATCH --time=24:00:00
set -euo pipefail

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=6000
LOGS=$SLURM_SUBMIT_DIR/logs/$SLURM_JOB_NAME-$SLURM_JOB_ID
mkdir -p "$LOGS"

RUN=$(mktemp)
cat > "$RUN" <<INNER
#!/bin/bash
set -e
cd /lustre/team/Megatron-LM
torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE \\
    --node_rank \$SLURM_NODEID --master_addr $MASTER_ADDR --master_port $MASTER_PORT \\
    pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 \\
    --max-position-embeddings 512 --num-experts 16 --moe-router-topk 2 --expert-model-parallel-size 8 \\
    --moe-token-dispatcher-type alltoall --disable-bias-linear --micro-batch-size 1 --global-batch-size 64 \\
    --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
INNER
chmod +x "$RUN"

srun --kill-on-bad-exit=1 -l "$RUN" 2>&1 | tee "$LOGS/train.log"
