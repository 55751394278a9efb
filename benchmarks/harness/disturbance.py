"""Finds out whether anything else used the processor while a sweep ran, by /proc/stat."""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_STEAL_SHARE = 0.01
MAX_OTHERS_SHARE = 0.03
"""Of the cores' time. Above, a sweep counts as disturbed."""
_TICKS_PER_S = 100  # USER_HZ, the unit of /proc/stat on every Linux architecture in use
_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class CpuTimes:
    """CPU time of some cores since boot, in seconds.

    Attributes:
        busy_s: in processes and the kernel on their behalf; without interrupts, which our own network traffic causes.
        steal_s: in which the hypervisor ran something else.
    """

    busy_s: float
    steal_s: float


def parse_stat(text: str, cores: list[int]) -> CpuTimes:
    """Sum of the lines of ``cores`` in /proc/stat."""
    busy = steal = 0
    for line in text.splitlines():
        name, *values = line.split() or [""]
        if name in {f"cpu{core}" for core in cores}:
            user, nice, system, _idle, _iowait, _irq, _softirq, stolen = (int(value) for value in values[:8])
            busy += user + nice + system
            steal += stolen
    return CpuTimes(busy / _TICKS_PER_S, steal / _TICKS_PER_S)


def cpu_times(cores: list[int]) -> CpuTimes:
    """As of now."""
    return parse_stat(_STAT.read_text(), cores)


@dataclass(frozen=True)
class Disturbance:
    """What else ran on the cores, as shares of their time."""

    steal_share: float
    others_share: float

    @property
    def is_disturbed(self) -> bool:
        """Whether figures of this sweep are not to be trusted."""
        return self.steal_share > MAX_STEAL_SHARE or self.others_share > MAX_OTHERS_SHARE

    def __str__(self) -> str:
        return f"{self.steal_share:.1%} of CPU time stolen by the hypervisor, {self.others_share:.1%} used by others"


def disturbance(before: CpuTimes, after: CpuTimes, own_s: float, elapsed_s: float, num_cores: int) -> Disturbance:
    """
    Args:
        own_s: CPU time that our ranks used in between.
    """
    total_s = elapsed_s * num_cores
    others_s = max(0.0, after.busy_s - before.busy_s - own_s)
    return Disturbance((after.steal_s - before.steal_s) / total_s, others_s / total_s)


class CpuWatch:
    """From now on watches what else runs on the cores; processes that we start count when they have ended."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = sorted(set(cores))
        self._own_s = self._own_cpu_s()
        self._before, self._start_s = cpu_times(self._cores), time.monotonic()

    def found(self) -> Disturbance:
        """What was seen since then, as shares of the cores' time."""
        elapsed_s, after = time.monotonic() - self._start_s, cpu_times(self._cores)
        return disturbance(self._before, after, self._own_cpu_s() - self._own_s, elapsed_s, len(self._cores))

    def _own_cpu_s(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime
