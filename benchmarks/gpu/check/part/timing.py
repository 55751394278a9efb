"""Steps of stock and of each plan in turns, at one size that is bound by the device, on two links, and on a free one.

The model is four of the 48 layers of Qwen3-30B-A3B, as rank 0 of eight sees them: hidden 2048, 128 experts, top 8, four
micro-batches of 6 x 4096 tokens; with one sequence each, launches took longer than kernels on an H200. Layers are
Megatron's local ones, and attention is torch's fused kernel on all sides. Messages go over the link of ``mock/``, whose
kernel takes SMs and memory bandwidth.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.gpu.measure import Measurement, Turns
from benchmarks.gpu.record import Recorder
from benchmarks.gpu.sizes import SIZES
from benchmarks.gpu.variants import MEGATRON_OVERLAP, STOCK, Work
from benchmarks.gpu.world import mocked_group
from megatron_lancet.testkit.mock.link import Link

if TYPE_CHECKING:
    from benchmarks.gpu.check.place import Place

NVLINK = Link(latency_us=10, gbytes_per_s=350)
"""A rank's share of NVLink 4 among eight ranks."""
NETWORK = Link(latency_us=10, gbytes_per_s=45)
"""One adapter of 400 Gbit/s."""
VARIANTS = (
    STOCK,
    "ours k=1",
    "ours k=2 sequence",
    "pairs",
    "tiles",
    "dedup",
    "dedup pairs",
    MEGATRON_OVERLAP,
)
SIZE = replace(SIZES["qwen3-like"], micro_batch=6)
NUM_RANKS = 8
NUM_MICRO_BATCHES = 4
_TRACES_S = 40
"""Time for the traced steps of all variants, in seconds: about 30 on an H200."""


def run(record: Recorder, place: "Place") -> None:
    """Saves the records of :mod:`benchmarks.gpu.measure`."""
    names: tuple[str, ...] = VARIANTS
    links: tuple[Link, ...] = (NVLINK,)
    if place.is_rehearsal:
        names = tuple(name for name in VARIANTS if name != MEGATRON_OVERLAP)
        record.add("variant", variant=MEGATRON_OVERLAP, skipped="the virtual GPU has no storage that can be resized")
        size = replace(SIZES["tiny"], micro_batch=2)
        turns = Turns(links, rounds=2, warmup=1, traced=1, has_ideal=True)
    else:
        size, links = SIZE, (NVLINK, NETWORK)
        turns = Turns(links, rounds=9, warmup=2, traced=1, reserve_s=_TRACES_S, has_ideal=True, compared_samples=1)
    work = Work(size, NUM_RANKS, NUM_MICRO_BATCHES, place.device)
    with mocked_group(NUM_RANKS) as using_link:
        Measurement(work, record, using_link, place.watch).run(names, turns)
