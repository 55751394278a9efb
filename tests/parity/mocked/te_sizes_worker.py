"""Counts the parameters of Transformer Engine's models: by a dry run, and in what Megatron builds. Writes both."""

import faulthandler
import json
import os
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from megatron_lancet.lab.dry_run.run import examine
from tests.unit.training.dry_run.test_sizes import LATENT, MODELS, MOE, SMALL, held_when_built

CHECKED = {name: MODELS[name] for name in ("biases", "expert tensor", "latent", "latent, whole queries")} | {
    "grouped experts": MOE + "--moe-grouped-gemm --swiglu --normalization RMSNorm",
    "fused down projection": MOE + LATENT + "--q-lora-rank 32 --qk-layernorm --mla-down-proj-fusion "
    "--tensor-model-parallel-size 2 --sequence-parallel",
}


def main() -> None:
    result = Path(sys.argv[1])
    os.environ.pop("WORLD_SIZE")  # the launcher's, not that of the runs
    sizes = {}
    for name, flags in CHECKED.items():
        sys.argv[1:] = shlex.split(SMALL + flags)
        findings = examine()
        assert findings.args.transformer_impl == "transformer_engine"
        counted, built = findings.size.held, held_when_built(findings)
        sizes[name] = {"counted": [*map(asdict, counted)], "built": [*map(asdict, built)]}
    result.write_text(json.dumps(sizes))


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    main()
