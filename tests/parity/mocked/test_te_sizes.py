"""A dry run also counts the parameters of Transformer Engine's layers as Megatron builds them."""

import os
import shlex
import sys
from dataclasses import asdict
from typing import Any

import pytest

from megatron_lancet.lab.dry_run.run import examine
from tests.ranks import launch
from tests.unit.training.dry_run.test_sizes import LATENT, MODELS, MOE, SMALL, held_when_built

pytestmark = pytest.mark.distributed

CHECKED = {name: MODELS[name] for name in ("biases", "expert tensor", "latent", "latent, whole queries")} | {
    "grouped experts": MOE + "--moe-grouped-gemm --swiglu --normalization RMSNorm",
    "fused down projection": MOE + LATENT + "--q-lora-rank 32 --qk-layernorm --mla-down-proj-fusion "
    "--tensor-model-parallel-size 2 --sequence-parallel",
}


def counted_and_built() -> dict[str, Any]:
    """Parameters of each model: by a dry run, and in what Megatron builds."""
    os.environ.pop("WORLD_SIZE")  # the launcher's, not that of the runs
    sizes = {}
    for name, flags in CHECKED.items():
        sys.argv[1:] = shlex.split(SMALL + flags)
        findings = examine()
        assert findings.args.transformer_impl == "transformer_engine"
        counted, built = findings.size.held, held_when_built(findings)
        sizes[name] = {"counted": [*map(asdict, counted)], "built": [*map(asdict, built)]}
    return sizes


def test_counted_parameters_equal_those_of_te_layers(tmp_path):
    (sizes,) = launch.results_of(counted_and_built, 1, tmp_path, te=launch.Te(), is_bare=True)
    assert len(sizes) == 6
    assert {name: size["counted"] for name, size in sizes.items()} == {
        name: size["built"] for name, size in sizes.items()
    }
