"""Detects other work on the processor and stalls of memory during a sweep, by /proc/stat and /proc/pressure/memory."""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

MAX_STEAL_SHARE = 0.01
MAX_OTHERS_SHARE = 0.03
"""Of the cores' time. Above, a sweep counts as disturbed."""
MAX_MEMORY_STALL_SHARE = 0.01
"""Of the time of the sweep. Above, it counts as disturbed."""
_TICKS_PER_S = 100  # USER_HZ, the unit of /proc/stat on every Linux architecture in use
_STAT = Path("/proc/stat")
_MEMORY_PRESSURE = Path("/proc/pressure/memory")


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


def parse_memory_stalls(text: str) -> float:
    """Seconds since boot in which all tasks waited for memory at once, by the line "full" of /proc/pressure/memory."""
    full = next(line for line in text.splitlines() if line.startswith("full "))
    return int(full.rpartition("total=")[2]) / 1e6


def memory_stalls_s() -> float | None:
    """As of now; None where the kernel does not count stalls."""
    try:
        return parse_memory_stalls(_MEMORY_PRESSURE.read_text())
    except OSError:  # built without, or switched off
        return None


@dataclass(frozen=True)
class Disturbance:
    """Use of the cores by others and stalls of memory, as shares of the time.

    Attributes:
        memory_stall_share: in which all tasks waited for memory; None where the kernel does not count stalls.
    """

    steal_share: float
    others_share: float
    memory_stall_share: float | None = None

    @property
    def is_disturbed(self) -> bool:
        """Whether figures of this sweep are not to be trusted."""
        return (
            self.steal_share > MAX_STEAL_SHARE
            or self.others_share > MAX_OTHERS_SHARE
            or (self.memory_stall_share or 0.0) > MAX_MEMORY_STALL_SHARE
        )

    def __str__(self) -> str:
        stalls = self.memory_stall_share
        waited = "" if stalls is None else f", all tasks waited for memory in {stalls:.1%} of the time"
        cpu = f"{self.steal_share:.1%} of CPU time stolen by the hypervisor, {self.others_share:.1%} used by others"
        return f"{cpu}{waited}"


def disturbance(before: CpuTimes, after: CpuTimes, own_s: float, elapsed_s: float, num_cores: int) -> Disturbance:
    """
    Args:
        own_s: CPU time that our ranks used in between.
    """
    total_s = elapsed_s * num_cores
    others_s = max(0.0, after.busy_s - before.busy_s - own_s)
    return Disturbance((after.steal_s - before.steal_s) / total_s, others_s / total_s)


class CpuWatch:
    """From now on watches the cores and memory; processes that we start count when they have ended."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = sorted(set(cores))
        self._own_s = self._own_cpu_s()
        self._before, self._stalls_s, self._start_s = cpu_times(self._cores), memory_stalls_s(), time.monotonic()

    def found(self) -> Disturbance:
        """Disturbance since then."""
        elapsed_s, after, stalls_s = time.monotonic() - self._start_s, cpu_times(self._cores), memory_stalls_s()
        cpu = disturbance(self._before, after, self._own_cpu_s() - self._own_s, elapsed_s, len(self._cores))
        if stalls_s is None or self._stalls_s is None:
            return cpu
        return replace(cpu, memory_stall_share=(stalls_s - self._stalls_s) / elapsed_s)

    def _own_cpu_s(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime
