"""Launch-bound steps with and without CUDA graphs, in turns.

The part ``timing`` has the same model and six times as many tokens. Micro-batches are 2 x 2048 tokens here.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.gpu.check.part.timing import NUM_MICRO_BATCHES, NUM_RANKS, NVLINK
from benchmarks.gpu.measure import Measurement, Turns
from benchmarks.gpu.record import Recorder
from benchmarks.gpu.sizes import SIZES
from benchmarks.gpu.variants import GRAPHS, MEGATRON_OVERLAP, STOCK, Work
from benchmarks.gpu.world import mocked_group

if TYPE_CHECKING:
    from benchmarks.gpu.check.place import Place

PLANS = ("ours k=1", "ours k=2", "pairs")
VARIANTS = (STOCK, *(name for plan in PLANS for name in (plan, plan + GRAPHS)))
SIZE = replace(SIZES["qwen3-like"], micro_batch=2, seq_length=2048)
_TRACES_S = 25
"""Time for the traced steps of all variants, in seconds: a guess."""


def run(record: Recorder, place: "Place") -> None:
    """Saves the records of :mod:`benchmarks.gpu.measure`."""
    names: tuple[str, ...] = VARIANTS
    if place.is_rehearsal:
        size, turns = replace(SIZES["tiny"], micro_batch=2), Turns((NVLINK,), rounds=2, warmup=2, traced=1)
    else:
        names += (MEGATRON_OVERLAP,)
        size, turns = SIZE, Turns((NVLINK,), rounds=15, warmup=3, traced=1, reserve_s=_TRACES_S)
    work = Work(size, NUM_RANKS, NUM_MICRO_BATCHES, place.device)
    with mocked_group(NUM_RANKS) as using_link:
        Measurement(work, record, using_link, place.watch).run(names, turns)
