#!/bin/bash
# Submits the job; the flags of sbatch come from the command line.
NODES=${1:-6}
jobid=$(sbatch --parsable --nodes="$NODES" --export=ALL,SEED=7 <<JOB
#!/bin/bash
#SBATCH --job-name=moe
#SBATCH --nodes=1
#SBATCH --tasks-per-node=4
#SBATCH --gres=gpu:4

export MASTER_ADDR=\$(scontrol show hostnames | head -n1)
srun --mpi=pmix -- singularity run --nv -B /data image.sif \
    python -m pretrain.gpt --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 \
    --max-position-embeddings 512 --num-experts 24 --moe-router-topk 2 --expert-model-parallel-size 24 \
    --moe-token-dispatcher-type alltoall --disable-bias-linear --micro-batch-size 1 --global-batch-size 48 \
    --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data --seed \$SEED
JOB
)
echo "submitted $jobid"
