"""Do two things that are on a wire at once share it, or does one wait for the other? Needs root and Linux.

    python -m benchmarks.parts.wire_sharing [--rate-mbps 100] [--repeats 5]

Two ranks in network namespaces of their own with a capped link between them. A message of 1 MB is sent, and a second
one a quarter of its time later: an all-to-all on the same connections, a forward dispatch (connections of its own), or
a gradient all-reduce. The table has the time at which each has arrived, in times of one message alone. One after the
other would be 1 and 2, equal parts (processor sharing) 1.75 and 2.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness.namespaces import NUM_NODES, SHAPED, Namespaces, check_host, this_host
from benchmarks.parts.frame import new_parser, parsed, write_result
from megatron_lancet.errors import run_command
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.runtime.transport.select import make_transport

_BYTES = 1_000_000
_LATER = 0.25
_TIMEOUT_S = 120
_STORE = "WIRE_SHARING_STORE"
"""Environment variable by which the ranks find each other; it is set for them only."""
_CPU = torch.device("cpu")

Wait = Callable[[], float]
"""Waits for a message, and returns the time at which it had arrived, in seconds."""


class Wire:
    """What can be sent between the two ranks."""

    def __init__(self) -> None:
        """Collective."""
        timeout = timedelta(seconds=_TIMEOUT_S)
        group = dist.group.WORLD
        assert group is not None
        self._transport = make_transport(group, group, _CPU, CommStats(_CPU), timeout)
        self._reduced = dist.new_group(backend="gloo", timeout=timeout)
        self._rows = [0 if rank == dist.get_rank() else _BYTES for rank in range(NUM_NODES)]

    def message(self, ready: bool = False) -> Wait:
        """An all-to-all; ``ready``: on the connections of forward dispatches."""
        sent = torch.zeros(_BYTES, 1, dtype=torch.uint8)
        mark = ReadyEvent(sent) if ready else None
        transfer = self._transport.launch(torch.empty_like(sent), sent, self._rows, self._rows, mark)

        def wait() -> float:
            transfer.wait()
            end = transfer.interval()[1]
            assert isinstance(end, float)
            return end

        return wait

    def dispatch(self) -> Wait:
        """A forward dispatch."""
        return self.message(ready=True)

    def gradients(self) -> Wait:
        """An all-reduce of as many bytes: a ring of two sends each byte once."""
        ended: list[float] = []
        work = dist.all_reduce(torch.zeros(_BYTES // 4), group=self._reduced, async_op=True)
        work.get_future().add_done_callback(lambda _: ended.append(time.perf_counter()))

        def wait() -> float:
            work.wait()
            while not ended:
                time.sleep(1e-4)
            return ended[0]

        return wait


def measure(arguments: argparse.Namespace) -> None:
    """On each rank; rank 0 prints and writes."""
    wire = Wire()
    repeats: int = arguments.repeats
    kinds: dict[str, Callable[[], Wait]] = {
        "all-to-all": wire.message, "dispatch": wire.dispatch, "gradients": wire.gradients,
    }  # fmt: skip

    def samples_s(first: Callable[[], Wait], second: Callable[[], Wait] | None, later_s: float) -> list[list[float]]:
        """Per repeat, the times at which the one or the two have arrived."""
        samples = []
        for _ in range(1 + repeats):
            dist.barrier()
            time.sleep(0.1)  # the link has rested
            dist.barrier()
            start_s = time.perf_counter()
            waits = [first()]
            if second is not None:
                time.sleep(later_s)
                waits.append(second())
            samples.append([wait() - start_s for wait in waits])
        return samples[1:]

    samples = {name: samples_s(start, None, 0.0) for name, start in kinds.items()}
    alone_s = {name: _medians(times)[0] for name, times in samples.items()}
    lines = [f"alone: {', '.join(f'{name} {1e3 * alone:.1f} ms' for name, alone in alone_s.items())}"]
    unit_s = alone_s["all-to-all"]
    for first, second in [
        ("all-to-all", "all-to-all"), ("all-to-all", "dispatch"), ("dispatch", "all-to-all"),
        ("all-to-all", "gradients"), ("gradients", "all-to-all"), ("gradients", "gradients"),
    ]:  # fmt: skip
        both = samples[f"{first}, {second}"] = samples_s(kinds[first], kinds[second], _LATER * unit_s)
        ends = [end / unit_s for end in _medians(both)]
        lines.append(f"{first:10} then {second:10}: {ends[0]:.2f} {ends[1]:.2f}")
    if dist.get_rank() == 0:
        print("\n".join(lines))
        write_result(arguments, {"rate_mbps": arguments.rate_mbps, "bytes": _BYTES, "samples_s": samples})


def _medians(samples: list[list[float]]) -> list[float]:
    return [statistics.median(times) for times in zip(*samples, strict=True)]


def run_ranks(arguments: argparse.Namespace) -> None:
    """Start a rank in each namespace and wait for them."""
    system, user_id, tools, cores = this_host()
    check_host(system, user_id, tools, [*cores, *cores])  # the link is slow: one core is enough for both
    with tempfile.TemporaryDirectory() as folder, Namespaces() as network:
        network.shape(arguments.rate_mbps * 1e6)
        processes = []
        for rank in range(NUM_NODES):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(NUM_NODES),
                "GLOO_SOCKET_IFNAME": SHAPED,
                _STORE: str(Path(folder) / "store"),
            }
            command = [sys.executable, "-m", "benchmarks.parts.wire_sharing", *sys.argv[1:]]
            processes.append(subprocess.Popen(network.command(rank, command), env=environment))
        try:
            statuses = [process.wait(_TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(statuses):
        raise SystemExit(1)


def main() -> None:
    """Runs the ranks, or is one of them."""
    parser = new_parser(__doc__, repeats=5)
    parser.add_argument("--rate-mbps", type=float, default=100.0, help="of the link, in Mbit/s (100)")
    arguments = parsed(parser, "wire_sharing")
    if _STORE not in os.environ:
        run_ranks(arguments)
        return
    torch.set_num_threads(1)
    store = dist.FileStore(os.environ[_STORE], NUM_NODES)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=NUM_NODES)
    measure(arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
