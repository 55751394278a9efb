"""Megatron's fused rotary embedding in sequence chunks, as the check compares it, in Triton's interpreter.

Usage: rope_worker.py RESULTS.jsonl. The model is small: a kernel takes milliseconds for each position and head. The
interpreter computes with the bits of bf16 as if they were integers, so precision is fp32.
"""

import logging
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

from triton.runtime import driver

from benchmarks.gpu.check import gradients
from benchmarks.gpu.check.place import rehearsal
from benchmarks.gpu.check.record import Recorder
from benchmarks.gpu.check.support import models
from megatron_lancet.patching import replaced
from tests.te_cpu.device import InterpreterDriver

SIZE = replace(models._IN_REHEARSAL, num_layers=1, num_heads=2, num_key_heads=2, seq_length=4, micro_batch=1)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    record = Recorder(Path(sys.argv[1]), 180)
    with (
        rehearsal() as place,
        replaced(driver, "_active", InterpreterDriver()),
        replaced(models, "_IN_REHEARSAL", SIZE),
        replaced(gradients, "NUM_REPEATS", 2),
    ):
        gradients.run(record, place, ["latent attention, fused rope"], ["ours k=2 sequence"], ["fp32"])
    raise SystemExit(min(record.num_errors, 1))


if __name__ == "__main__":
    main()
