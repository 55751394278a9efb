"""Several ranks with real process groups: gradients of all plans, and with a device for each rank their times.

On one device two ranks talk over NCCL's sockets: this shows that nothing hangs and that gradients are right, and says
nothing about time. A rehearsal has two ranks on the CPU over gloo.
"""

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check.place import Place
from benchmarks.gpu.check.rank.gradients import CASES, title_of
from benchmarks.gpu.check.rank.launch import Ranks
from benchmarks.gpu.check.rank.merge import SETTING, Merger
from benchmarks.gpu.record import Recorder
from benchmarks.gpu.variants import STOCK
from megatron_lancet.lab.check.ranks import held_port

CASE_LIMIT_S = 20.0
"""For the gradients of one plan; in the first one NCCL connects the ranks."""
_MOST_RANKS = 8
_RESERVE_S = 8.0
"""Of the part's limit, for the end of ranks that hang."""
_LEAST_RESTART_S = 20.0
"""Ranks import Megatron and connect before they do anything."""
_TAIL_CHARS = 3000

_ONE_DEVICE = (
    "two ranks share a device: NCCL's kernels and messages are real, but go over sockets of this host, and the ranks "
    "take turns on the device. Results say that nothing hangs and that gradients are right; times mean nothing."
)
_MANY_DEVICES = (
    "each rank has a device. Against one device with a modelled link: messages are NCCL's, take SMs and memory "
    "bandwidth, and go to real peers, some of which are later than others."
)
_REHEARSAL = "two ranks on the CPU over gloo, with small models: times mean nothing."


@dataclass(frozen=True)
class Layout:
    """How many ranks there are, and where.

    Attributes:
        on_cpu: over gloo, else over NCCL.
        shares_device: all ranks are on the first device.
    """

    num_ranks: int
    on_cpu: bool = False
    shares_device: bool = False

    @property
    def text(self) -> str:
        """What the ranks show, for readers."""
        return _REHEARSAL if self.on_cpu else _ONE_DEVICE if self.shares_device else _MANY_DEVICES


def layout_of(num_devices: int) -> Layout:
    """A rank for each device, as many as the largest power of two among up to eight; two for one device.

    Args:
        num_devices: at least 1.
    """
    if num_devices == 1:
        return Layout(2, shares_device=True)
    return Layout(1 << min(num_devices, _MOST_RANKS).bit_length() - 1)


def run(record: Recorder, place: Place) -> None:
    """The part."""
    layout = Layout(2, on_cpu=True) if place.is_rehearsal else layout_of(torch.cuda.device_count())
    record.add("ranks", ranks=layout.num_ranks, shares_device=layout.shares_device, shows=layout.text)
    undone, results = list(CASES), []
    while True:
        merger = Merger(record, layout.num_ranks)
        _run_ranks(record, merger, layout, undone)
        results += merger.results
        left = [name for name in undone if title_of(name) not in merger.ended]
        if not merger.failed_ranks or not left or len(left) == len(undone):
            break  # all is done, or the ranks can't even start
        undone = left
        if record.time_left_s() < _LEAST_RESTART_S + _RESERVE_S:
            record.add("left out", what=", ".join(left), why="ranks had failed, and the time is up")
            break
    summarise_steps(record, results)


def _run_ranks(record: Recorder, merger: Merger, layout: Layout, cases: Sequence[str]) -> None:
    """Starts ranks for the cases, and for the timing where each of them has a device; takes what they save."""
    limit_s = record.time_left_s() - _RESERVE_S
    arguments = ["--limit", f"{limit_s:.1f}", "--case-limit", str(CASE_LIMIT_S), "--cases", *cases]
    if layout.on_cpu:
        arguments.append("--on-cpu")
    if not layout.shares_device:
        arguments.append("--timing")
    with tempfile.TemporaryDirectory(prefix="ranks") as folder, held_port() as port:
        ranks = Ranks(layout.num_ranks, port, Path(folder), arguments, layout.shares_device)
        try:
            ranks.wait(limit_s, merger.take)
        finally:
            ranks.kill()
        merger.close()
        done_in_turn = [SETTING, *map(title_of, cases), "timing"]
        at_work = merger.last_error or next(name for name in done_in_turn if name not in merger.ended)
        for rank, process in enumerate(ranks.processes):
            if process.returncode and rank not in merger.failed_ranks:
                merger.end_without_result(rank, at_work, process.returncode, ranks.log(rank)[-_TAIL_CHARS:])


def summarise_steps(record: Recorder, results: Sequence[dict[str, Any]]) -> None:
    """Saves each variant's median step and speed-up against stock: of the slowest rank in each round.

    Args:
        results: of all ranks together.
    """
    rounds: defaultdict[str, dict[int, float]] = defaultdict(dict)
    exposed: defaultdict[str, list[float]] = defaultdict(list)
    for result in results:
        if result["name"] == "step":
            rounds[result["variant"]][result["round"]] = result["ms"]
            if result["exposed_ms"] is not None:
                exposed[result["variant"]].append(result["exposed_ms"])
    for variant, ms in rounds.items():
        both = ms.keys() & rounds[STOCK].keys() if STOCK in rounds else set()
        record.add(
            "steps",
            variant=variant,
            rounds=len(ms),
            median_ms=statistics.median(ms.values()),
            speedup=statistics.median(rounds[STOCK][number] / ms[number] for number in both) if both else None,
            exposed_ms=statistics.median(exposed[variant]) if exposed[variant] else None,
        )
