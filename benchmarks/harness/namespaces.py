"""Two network namespaces, a shaped link and a free one between them; the host's own network is never touched."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from megatron_lancet.errors import UsageError

SHAPED, FREE = "veshaped", "vefree"
"""Interface names, the same in both namespaces. gloo falls back to 127.0.0.1 where a name has one letter."""
NUM_NODES = 2
"""Namespaces, each with one rank or several. What ranks of one send to each other stays on its loopback interface."""
_SUBNETS = {SHAPED: "10.77.0", FREE: "10.78.0"}
_MTU = 9000
_TCP_SETTINGS = {
    # Room for long bursts in the sockets, so that write() does not throttle gloo.
    "tcp_wmem": "4096 16777216 33554432",
    "tcp_rmem": "4096 16777216 33554432",
    "tcp_slow_start_after_idle": "0",
    # Whatever the host's is: bbr paces by its own guess of the rate and slows down on purpose to measure, tens of
    # milliseconds at a time. This one is in every kernel, and a queue that loses nothing never slows it down.
    "tcp_congestion_control": "reno",
}
_MIN_BURST_BYTES = 70_000
_BURST_S = 0.25e-3
_QUEUE_LIMIT = "16mb"
_NAME = re.compile(r"lancet-(\d+)-[01]")

Run = Callable[[Sequence[str]], str]
"""Runs a command and returns its output; raises CommandError."""


class CommandError(Exception):
    """A command failed; the message has what it printed."""


def run_command(command: Sequence[str]) -> str:
    """Run to the end.

    Raises:
        CommandError: it failed or does not exist.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"`{' '.join(command)}`: {error}") from error
    if done.returncode != 0:
        raise CommandError(f"`{' '.join(command)}`: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A clean-up that a second Ctrl-C does not cut short."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def check_host(system: str, user_id: int, tools: Iterable[str], cores: Sequence[int]) -> None:
    """
    Args:
        system: name of the operating system.
        tools: which of ``ip`` and ``tc`` are there.
        cores: that this process may use.

    Raises:
        UsageError: the benchmark can't run here.
    """
    if system != "Linux":
        raise UsageError(f"the network benchmark needs Linux with network namespaces; this is {system}.")
    missing = sorted({"ip", "tc"} - set(tools))
    if missing:
        raise UsageError(
            f"the network benchmark needs {' and '.join(missing)}, not found on PATH. Install iproute2, for example: "
            "apt install iproute2."
        )
    if user_id != 0:
        raise UsageError(
            f"the network benchmark needs root, to make network namespaces; this is user {user_id}. "
            "Run: sudo make bench-network"
        )
    if len(cores) < NUM_NODES:
        raise UsageError(
            f"the network benchmark needs {NUM_NODES} cores; this process may use {len(cores)}. "
            "Give the machine, the container or the taskset more."
        )


def this_host() -> tuple[str, int, list[str], list[int]]:
    """Arguments of :func:`check_host` for the machine that this runs on."""
    system = os.uname().sysname
    cores = sorted(os.sched_getaffinity(0)) if system == "Linux" else []
    return system, os.geteuid(), [tool for tool in ("ip", "tc") if shutil.which(tool)], cores


def shaping_command(interface: str, rate_bps: float | None) -> list[str]:
    """The command that caps what leaves an interface, to be run in its namespace.

    Args:
        rate_bps: bits per second; None removes the cap.
    """
    if rate_bps is None:
        return ["tc", "qdisc", "del", "dev", interface, "root"]
    # Less than a 64 KB segment and tbf cuts segments in software; less than a timer's tick at line rate and it idles.
    burst_bytes = max(_MIN_BURST_BYTES, round(rate_bps / 8 * _BURST_S))
    shape = ["tbf", "rate", f"{round(rate_bps)}bit", "burst", str(burst_bytes), "limit", _QUEUE_LIMIT]
    return ["tc", "qdisc", "replace", "dev", interface, "root", *shape]


class Namespaces:
    """A context in which namespace ``names[i]`` is there for node i; at its end both are gone, and all in them.

    What a rank sends to another one of its node goes to the node's own address, so it never meets the shaped queue;
    what it sends to the other node shares one shaped interface with that rank, as ranks share a network card.

    Attributes:
        names: of the namespaces.
        ranks_per_node: ranks in each of them; rank r is in ``names[r // ranks_per_node]``.
    """

    def __init__(self, run: Run = run_command, process_id: int | None = None, ranks_per_node: int = 1) -> None:
        self._run = run
        process_id = os.getpid() if process_id is None else process_id
        self.names = [f"lancet-{process_id}-{node}" for node in range(NUM_NODES)]
        self.ranks_per_node = ranks_per_node

    @property
    def num_ranks(self) -> int:
        """Of both nodes."""
        return NUM_NODES * self.ranks_per_node

    def __enter__(self) -> "Namespaces":
        """
        Raises:
            UsageError: this kernel or container can't make them.
        """
        self._remove_abandoned()
        try:
            self._make()
        except CommandError as error:
            self._remove(self.names)
            raise UsageError(
                f"can't make the test network: {error}. The kernel needs network namespaces, veth and the tbf "
                "queueing discipline, and a container needs --privileged."
            ) from error
        except BaseException:
            self._remove(self.names)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove(self.names)

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """``command`` as it runs in the namespace of ``rank``."""
        return self._inside(self.names[rank // self.ranks_per_node], command)

    @staticmethod
    def address(interface: str, node: int) -> str:
        """IPv4 address of a node's end of a link, which all its ranks share."""
        return f"{_SUBNETS[interface]}.{node + 1}"

    def shape(self, rate_bps: float) -> None:
        """Cap both directions of the shaped link; also while it is in use."""
        for name in self.names:
            self._run(self._inside(name, shaping_command(SHAPED, rate_bps)))

    @staticmethod
    def _inside(name: str, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", name, *command]

    def _make(self) -> None:
        for name in self.names:
            self._run(["ip", "netns", "add", name])
            self._run(["ip", "-n", name, "link", "set", "lo", "up"])
        first, second = self.names
        for interface in (SHAPED, FREE):
            # Both ends are born inside: the host's namespace never sees them.
            ends = [interface, "netns", first, "type", "veth", "peer", "name", interface, "netns", second]
            self._run(["ip", "link", "add", *ends])
            for node, name in enumerate(self.names):
                self._run(["ip", "-n", name, "link", "set", interface, "mtu", str(_MTU)])
                address = f"{self.address(interface, node)}/24"
                self._run(["ip", "-n", name, "addr", "add", address, "dev", interface])
                self._run(["ip", "-n", name, "link", "set", interface, "up"])
        for name in self.names:
            for setting, value in _TCP_SETTINGS.items():
                # Each namespace has its own copy of these.
                write = f"echo '{value}' > /proc/sys/net/ipv4/{setting}"
                self._run(self._inside(name, ["sh", "-c", write]))
        self.shape(1e9)

    def _remove(self, names: Sequence[str]) -> None:
        """Also what a failed start left."""
        with uninterrupted():
            existing = self._existing()
            for name in names:
                if name in existing:
                    self._run(["ip", "netns", "del", name])

    def _existing(self) -> list[str]:
        return [line.split()[0] for line in self._run(["ip", "netns", "list"]).splitlines() if line.strip()]

    def _remove_abandoned(self) -> None:
        """What a run left that was killed too hard to clean up."""
        try:
            existing = self._existing()
        except CommandError as error:
            raise UsageError(f"can't list network namespaces: {error}.") from error
        matches = [match for name in existing if (match := _NAME.fullmatch(name))]
        self._remove([match[0] for match in matches if not Path(f"/proc/{match[1]}").exists()])
