"""Arguments of real public launch scripts."""

import csv
import shlex
from pathlib import Path

LISTS = Path(__file__).parents[3] / "launch_args"
with (LISTS / "MANIFEST.tsv").open() as manifest:
    NAMES = [row["name"] for row in csv.DictReader(manifest, delimiter="\t")]
MIXTRAL = "megatron_mixtral_8x7b"
FSDP = shlex.split(
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor "
    "--no-gradient-accumulation-fusion --pipeline-model-parallel-size 1"
)
"""What Megatron's functional tests of FSDP have in common."""
