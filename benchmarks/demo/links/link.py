"""The link between the two ranks: network namespaces where this machine allows them, else a paced transport."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Protocol

from benchmarks.demo.folder import REPOSITORY
from benchmarks.harness.namespaces import FREE, NUM_NODES, SHAPED, Namespaces, check_host, this_host
from megatron_lancet.errors import UsageError

NAMESPACES, PACED = "namespaces", "paced"
IN_USER_NAMESPACE = "--in-user-namespace"
FREE_BPS = 2e9
"""Before the rate is set: fast enough that nothing waits long."""
_PROBE_TIMEOUT_S = 20
_PORTS = range(20_000, 32_000)
"""Below the ports that the kernel deals out: gloo takes hundreds of them meanwhile."""


class Link(Protocol):
    """Where ranks are started, and what caps the rate of their all-to-alls.

    Attributes:
        kind: :data:`NAMESPACES` or :data:`PACED`.
        description: for the user.
        interface: name of the capped interface in the ranks' namespaces; None with a paced transport.
        paced_bps: rate that a paced transport keeps, in bits per second; None where the kernel does.
    """

    kind: str
    description: str
    interface: str | None
    paced_bps: float | None

    def set_rate(self, rate_bps: float) -> None:
        """Caps both directions, in bits per second; all ranks wait between two steps."""

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """``command`` as it runs on one side of the link, 0 or 1."""

    def rendezvous(self) -> dict[str, str]:
        """Environment variables by which the ranks of a new process group meet."""


class NamespaceLink:
    """Each rank in a network namespace of its own, with a link between them whose rate the kernel caps."""

    kind = NAMESPACES
    interface: str | None = SHAPED
    paced_bps: float | None = None

    def __init__(self, namespaces: Namespaces, is_unprivileged: bool) -> None:
        self._namespaces = namespaces
        self._port = 29500
        self.description = "two network namespaces with a link between them whose rate the kernel caps" + (
            " (in a user namespace, without root)" if is_unprivileged else ""
        )

    def set_rate(self, rate_bps: float) -> None:
        self._namespaces.shape(rate_bps)

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        return self._namespaces.command(node, command)

    def rendezvous(self) -> dict[str, str]:
        self._port += 1  # the namespaces are ours alone: every port is free but our other ranks' ports
        return {
            "MASTER_ADDR": Namespaces.address(FREE, 0),
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": FREE,
        }


class PacedLink:
    """Both ranks on this host; each holds its messages back for as long as a link of that rate would take."""

    kind = PACED
    interface: str | None = None

    def __init__(self, reason: str) -> None:
        """
        Args:
            reason: why there is no real link.
        """
        self.paced_bps: float | None = FREE_BPS
        self.description = f"PACED transport, no real link: each message is held back for as long as it takes; {reason}"

    def set_rate(self, rate_bps: float) -> None:
        self.paced_bps = rate_bps

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        return list(command)

    def rendezvous(self) -> dict[str, str]:
        while True:
            with socket.socket() as probe, suppress(OSError):
                probe.bind(("127.0.0.1", secrets.choice(_PORTS)))
                return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


@contextmanager
def link(wanted: str, is_unprivileged: bool) -> Iterator[Link]:
    """The link of a demo; at its end the namespaces are gone.

    Args:
        wanted: :data:`NAMESPACES`, :data:`PACED` or ``auto``: the former where they are possible.
        is_unprivileged: this process is root in a user namespace only.

    Raises:
        UsageError: namespaces are wanted, and this machine can't make them.
    """
    namespaces = Namespaces()
    reason: str | None = "asked for by --link paced"
    with ExitStack() as stack:
        if wanted != PACED:
            try:
                check_host(*this_host())
                stack.enter_context(namespaces)
                reason = None
            except UsageError as error:
                # It speaks of the benchmarks, which need the same.
                reason = str(error).replace("the network benchmark", "a real link")
                reason = reason.replace("make bench-network", "make demo")
                if wanted == NAMESPACES:
                    raise UsageError(reason) from error
        if reason is not None:
            yield PacedLink(reason)
            return
        namespaces.shape(FREE_BPS)
        yield NamespaceLink(namespaces, is_unprivileged)


_BE_ROOT = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
_PREPARE = "mount -t tmpfs tmpfs /run && ip link set lo up"
"""Names of network namespaces are files in /run, which here is a folder of this process and its children."""


def enter_user_namespace(wanted: str, argv: Sequence[str]) -> None:
    """Starts the demo again as root of a user namespace, if it is not root and this machine allows that.

    Does not return then: the namespaces of users and networks end with the process.
    """
    if wanted == PACED or sys.platform != "linux" or os.geteuid() == 0 or IN_USER_NAMESPACE in argv:
        return
    if any(shutil.which(tool) is None for tool in ("unshare", "ip", "tc")):
        return
    probe = [*_BE_ROOT, "sh", "-c", f"{_PREPARE} && ip netns add lancet-probe && ip netns exec lancet-probe true"]
    try:
        allowed = subprocess.run(probe, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        allowed = False
    if allowed:
        again = [sys.executable, "-m", "benchmarks.demo", IN_USER_NAMESPACE, *argv]
        os.environ["PYTHONPATH"] = str(REPOSITORY)
        os.execvp(_BE_ROOT[0], [*_BE_ROOT, "sh", "-c", f'{_PREPARE} && exec "$@"', "sh", *again])  # noqa: S606


def rank_cores() -> list[int]:
    """A core for each side of the link; both have the same if there is one only."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[rank % len(cores)] for rank in range(NUM_NODES)]
