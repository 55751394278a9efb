"""Short launch scripts: their number of ranks and its source, or why they are refused."""

COUNTS: dict[str, tuple[int | None, str]] = {
    "#SBATCH --nodes=4\nsrun -n 32 python -u {train}": (32, "srun --ntasks 32"),
    "srun --nodes=2-4 --ntasks-per-node 8 -l python {train}": (32, "srun --nodes 4 --ntasks-per-node 8"),
    "srun -lN8 --ntasks-per-node=8 torchrun --standalone --nproc-per-node=4 {train}": (
        *(4, "torchrun --nproc-per-node 4"),
    ),
    "srun torchrun --standalone --nproc-per-node=4 {train}": (
        *(4, "SLURM_NNODES is not set: 1 node assumed x torchrun --nproc-per-node 4"),
    ),
    "#SBATCH --ntasks-per-node 8\n#SBATCH -N 2 # two\nsrun --nodes=1 python {train}": (
        *(8, "srun --nodes 1 x #SBATCH --ntasks-per-node=8"),
    ),
    "#SBATCH --nodes=4\nsrun torchrun --nproc_per_node 8 {train}": (
        32,
        "#SBATCH --nodes=4 x torchrun --nproc-per-node 8",
    ),
    "#SBATCH --nodes=4\nexport WORLD_SIZE=32\nsrun python -u {train}": (32, "WORLD_SIZE=32"),
    "#SBATCH -N4 --ntasks-per-node=8\nexport WORLD_SIZE=16\nsrun python {train}": (
        *(32, "#SBATCH --nodes=4 --ntasks-per-node=8; WORLD_SIZE=16 differs"),
    ),
    "set -u\ntorchrun --nnodes $SLURM_NNODES --nproc-per-node 8 {train}": (
        *(8, "SLURM_NNODES is not set: 1 node assumed x torchrun --nproc-per-node 8"),
    ),
    "torchrun --nnodes ${SLURM_NNODES:-4} --nproc-per-node 8 {train}": (32, "torchrun --nnodes 4 --nproc-per-node 8"),
    "#SBATCH --nodes=4\necho\n#SBATCH --nodes=8\nsrun -N $SLURM_NNODES python {train}": (
        *(4, "srun --nodes 4, one task a node"),
    ),
    "PET_NNODES=2 PET_NPROC_PER_NODE=8 torchrun {train}": (16, "torchrun --nnodes 2 --nproc-per-node 8"),
    "printf 'a slots=8\\nb slots=8\\n' > hosts; deepspeed --hostfile hosts {train}": (
        *(16, "deepspeed with a hostfile of 2 hosts"),
    ),
    "mpirun -H a:8,b:8 -x A=1 --allow-run-as-root -mca pml ob1 python {train}": (16, "mpirun with 2 hosts"),
    "mpirun -H a,b -N 8 python {train}": (16, "mpirun with 2 hosts"),
    "mpirun --host a:8,b:8 --npernode 4 python {train}": (8, "mpirun with 2 hosts"),
    "mpirun --host a,b,a python {train}": (3, "mpirun with 2 hosts"),
    "mpiexec.hydra -bootstrap ssh -n 16 -ppn 8 python {train}": (16, "mpiexec.hydra -n 16"),
    "#SBATCH -N 2 --gpus-per-node=4 --ntasks-per-gpu=1\nsrun python {train}": (
        *(8, "#SBATCH --nodes=2 --gpus-per-node=4 --ntasks-per-gpu=1"),
    ),
    "#SBATCH --nodes=2\nsrun --gres=gpu:4 bash -c 'torchrun --nproc-per-node gpu {train}'": (
        *(8, "#SBATCH --nodes=2 x torchrun --nproc-per-node gpu (srun --gres=gpu:4)"),
    ),
    "PYTHON=/opt/absent/bin/python3\n$PYTHON -m torch.distributed.run --nproc-per-node 2 {train}": (
        *(2, "torchrun --nproc-per-node 2"),
    ),
    "srun bash <<'HERE'\npython {train}\nHERE": (1, "SLURM_NNODES is not set: 1 node assumed, one task a node"),
    "salloc -N 2 --ntasks-per-node=8 srun python {train}": (16, "salloc --nodes=2 --ntasks-per-node=8"),
    "python {train}": (None, ""),
    "deepspeed --include=localhost:0,1,2,5 {train}": (4, "deepspeed --include localhost:0,1,2,5"),
    "deepspeed --include host:0,1@host2:0 {train}": (3, "deepspeed --include host:0,1@host2:0"),
    "deepspeed --include a:0,1@b --hostfile hosts {train}": (10, "deepspeed --include a:0,1@b"),
    "deepspeed --include localhost {train}": (8, "deepspeed --include localhost (8 GPUs a node assumed)"),
    "deepspeed -H hosts --exclude b:0,7 {train}": (14, "deepspeed --exclude b:0,7 with 2 hosts"),
    "deepspeed --hostfile hosts --num_nodes 1 {train}": (8, "deepspeed --num_nodes 1 with a hostfile of 2 hosts"),
    "deepspeed --hostfile hosts --num_gpus=4 {train}": (8, "deepspeed --num_gpus 4 with a hostfile of 2 hosts"),
    "accelerate launch --num_machines 4 --num_processes 32 --machine_rank 0 --multi_gpu {train}": (
        *(32, "accelerate launch --num_processes 32"),
    ),
    "accelerate launch --num-processes=8 -m megatron_pretrain --num-layers 2": (
        *(8, "accelerate launch --num_processes 8"),
    ),
    "printf 'num_machines: 2\\nnum_processes: 16\\n' > c.yaml\naccelerate launch --config_file c.yaml {train}": (
        *(16, "num_processes: 16 in accelerate's --config_file"),
    ),
    "accelerate launch --mixed_precision bf16 {train}": (8, "accelerate launch (8 GPUs a node assumed)"),
    "#PBS -l select=4:ncpus=64:ngpus=8,walltime=1:00:00\n#PBS -l place=scatter:excl\nmpiexec -n 4 --ppn 1 "
    "--hostfile $PBS_NODEFILE torchrun --nnodes $(sort -u $PBS_NODEFILE | wc -l) --nproc-per-node 8 {train}": (
        *(32, "#PBS -l select=4:ncpus=64:ngpus=8 x torchrun --nproc-per-node 8"),
    ),
    "#PBS -lselect=2:ngpus=4:mpiprocs=4+1:ngpus=4:mpiprocs=2 -N moe\ncd $PBS_O_WORKDIR\nmpirun python {train}": (
        *(10, "#PBS -l select=2:ngpus=4:mpiprocs=4+1:ngpus=4:mpiprocs=2, a host for each chunk assumed x mpirun"),
    ),
    "#PBS -l nodes=4:ppn=8\nset -u\nmpirun -np $PBS_NP python {train}": (32, "mpirun -np 32"),
    "#PBS -l nodes=4:ppn=8\nmpiexec -ppn 2 python {train}": (8, "#PBS -l nodes=4:ppn=8 x mpiexec --ppn 2"),
    "#PBS -l nodes=3:ppn=8:gpus=4\npbsdsh -u torchrun --nnodes 3 --nproc-per-node gpu {train}": (
        *(12, "torchrun --nnodes 3 --nproc-per-node gpu (#PBS -l nodes=3:ppn=8:gpus=4)"),
    ),
    "qsub -l select=2:ngpus=8 -v SEED=1 <<'JOB'\n#PBS -N moe\n"
    "torchrun --nnodes $PBS_NUM_NODES --nproc-per-node 8 {train}\nJOB": (
        *(16, "qsub -l select=2:ngpus=8, a host for each chunk assumed x torchrun --nproc-per-node 8"),
    ),
    "torchrun --nnodes $(sort -u $PBS_NODEFILE | wc -l) --nproc-per-node 8 {train}": (
        *(8, "PBS_NODEFILE is not set: 1 node assumed x torchrun --nproc-per-node 8"),
    ),
    "export MINE=1\nfor host in a b c; do ssh -o BatchMode=yes -p 22 me@$host -t 'export IS=${MINE:-unset}; cd /x && "
    "torchrun --nnodes 3 --nproc-per-node 8 {train}' & done; wait": (24, "torchrun --nnodes 3 --nproc-per-node 8"),
    "pdsh -f 64 -w node[1-4] 'WORLD_SIZE=4 RANK=%n python {train}'": (4, "WORLD_SIZE=4"),
    "ssh a <<'HERE'\nexport WORLD_SIZE=2\npython {train}\nHERE": (2, "WORLD_SIZE=2"),
}

FAILURES = {
    "set -e\ngrep -q x /dev/null\ntorchrun pretrain.py": r"line 3 failed with status 1: grep -q x /dev/null\. expected",
    "torchrun --nnodes 1 \\\n  --nproc-per-node 8\n--num-layers 4": r"line 4: --num-layers: command .* lacks a \\ at",
    "set -u\necho $MY_NODES": r"line 3: MY_NODES: unbound variable\. Set it, .*: MY_NODES=VALUE lancet",
    "my-launcher pretrain_gpt.py": r"line 2: my-launcher: command not found\. my-launcher is not on this machine",
    "torchrun --nnodes $MY_NODES --nproc-per-node 8 pretrain_gpt.py": r"--nnodes expects a whole .* found 'nothing'",
    "export N=2\nssh a 'torchrun --nnodes $N --nproc-per-node 8 pretrain_gpt.py'": r"--nnodes expects .* 'nothing'",
    "ssh a my-launcher pretrain_gpt.py": r"my-launcher: command not found\. my-launcher is not on this machine",
    "deepspeed --include a:0,1 --num_gpus 2 pretrain_gpt.py": r"takes --include alone .* --num_gpus 2 --include a:0,1",
    "deepspeed --include a:0 --exclude b pretrain_gpt.py": r"takes --include alone or --exclude alone, found --include",
    "deepspeed --include a:0-3 pretrain_gpt.py": r"expects HOST:SLOT,SLOT@HOST, found 'a:0-3'",
    "echo a slots=4 > h\ndeepspeed -H h --include b:0 pretrain_gpt.py": r"hostfile has no host b: it has a\.",
    "echo a slots=4 > h\ndeepspeed -H h --include a:4 pretrain_gpt.py": r"a has no slot 4: its slots are 0 to 3\.",
    "echo a slots=4 > h\ndeepspeed -H h --num_nodes 2 pretrain_gpt.py": r"--num_nodes 2: the hostfile has 1 hosts\.",
    "echo a slots=1 > h\ndeepspeed -H h --exclude a pretrain_gpt.py": r"--exclude a leaves no slot of a\.",
    "deepspeed --hostfile /job/hosts pretrain_gpt.py": r"hostfile /job/hosts is not on this machine\. Put the file",
    "python -m deepspeed --hostfile /job/hosts pretrain_gpt.py": r"hostfile /job/hosts is not on this machine\. Put",
    "deepspeed -H /job/hosts --include a pretrain_gpt.py": r"slots of a from the hostfile /job/hosts, which is not on",
    "deepspeed --num_nodes $NODES pretrain_gpt.py --num-layers 2": r"--num_nodes pretrain_gpt.py .* option that has no",
    "accelerate launch --num_machines 2 pretrain_gpt.py": r"does not say how many processes all machines start\. Pass",
    "accelerate launch --num_machines 3 --num_processes 8 pretrain_gpt.py": r"8 processes can't be shared evenly by 3",
    "accelerate launch --config_file /c.yaml pretrain_gpt.py": r"--config_file /c.yaml is not on this machine\. Pass",
    "accelerate launch --num_processes 4 --deepspeed_inclusion_filter a:0 pretrain_gpt.py": r"on_filter is not read",
    "#PBS -l select=0:ngpus=8\ntorchrun pretrain_gpt.py": r"#PBS -l select=0:ngpus=8: expected whole numbers",
    "#PBS -l nodes=2:ppn=x\ntorchrun pretrain_gpt.py": r"#PBS -l nodes=2:ppn=x: expected whole numbers .* found '2:ppn",
}
