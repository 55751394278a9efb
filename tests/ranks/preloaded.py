"""A process that imports torch and Megatron once and forks a rank per request: imports take longer than most tests.

The forked process runs a script as its main program, with arguments, environment and output file of its own.
``launch.py`` starts ranks here where nothing is tested that happens on import. SIGUSR1 makes a rank print its stacks.

A rank ends behind its exit handlers: the rest of an interpreter's end takes half a second with all these modules. A
test of that end sets the variable :data:`FULL_END`.

With ``--te`` the process imports the tests' Transformer Engine first, and Megatron then finds it: a second process of
this kind, for the ranks that ask for it.
"""

import argparse
import atexit
import faulthandler
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODULES = (
    "megatron_lancet.training.pretrain",
    "megatron_lancet.training.arguments",
    "megatron_lancet.training.megatron.gpt_data",
    "megatron_lancet.testkit.mock.run",
    "megatron_lancet.training.overlap_setup",
    "megatron_lancet.training.job",
    "megatron_lancet.training.run",
    "megatron_lancet.training.plan.select",
    "megatron_lancet.training.platform.detect",
    "megatron_lancet.training.observe.step_recorder",
    "megatron_lancet.training.megatron.patches",
    "megatron.training",
    "megatron.core.models.mimo.optimizer",
    "megatron.core.tokenizers.text.text_tokenizer",
)
MORE = "LANCET_TEST_PRELOADS"
"""Environment variable of the process that forks: a further module, which is imported last."""
FULL_END = "LANCET_TEST_FULL_END"
"""Environment variable of a rank that ends as any interpreter does."""
_TE_FLAG = "--te"
_READY_WITHIN_S = 120.0
_ANSWER_WITHIN_S = 30.0
_MAX_REQUEST_BYTES = 1 << 20


class Rank:
    """A forked rank, with those methods of ``subprocess.Popen`` that the tests use.

    Attributes:
        returncode: exit status, negative for a signal; None while it runs.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.returncode: int | None = None
        self._connection = connection
        self.pid = int(self._receive(_ANSWER_WITHIN_S))

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        if self.returncode is None:
            self.returncode = int(self._receive(timeout))
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL if it still runs."""
        self.send_signal(signal.SIGKILL)

    def _receive(self, timeout_s: float | None) -> str:
        self._connection.settimeout(max(timeout_s, 1e-3) if timeout_s is not None else None)
        try:
            answer = self._connection.recv(64).decode()
        except TimeoutError:
            raise subprocess.TimeoutExpired("rank", timeout_s or 0.0) from None
        assert answer, "the process that forks ranks is gone"
        return answer


def fork(address: Path, command: Sequence[str], environment: Mapping[str, str], log: Path, cwd: Path) -> Rank:
    """A rank that runs ``command``, a script and its arguments, forked by the process that listens at ``address``."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(address))
    request = {"command": list(command), "environment": dict(environment), "log": str(log), "cwd": str(cwd)}
    connection.send(json.dumps(request).encode())
    return Rank(connection)


class Preloaded:
    """The process that forks, seen from the tests.

    Attributes:
        address: of its socket, for :func:`fork` in other processes.
    """

    def __init__(self, environment: Mapping[str, str], folder: Path, te: bool = False) -> None:
        """
        Args:
            environment: in which the modules are imported.
            folder: of its socket and its log; the path must be short.
            te: imports the tests' Transformer Engine before them.
        """
        self.address = folder / "fork"
        self._log = folder / "preloaded.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(self.address), *([_TE_FLAG] if te else [])],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline_s = time.monotonic() + _READY_WITHIN_S
        while not self.address.exists():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, "imports took too long"
            time.sleep(0.02)

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path, cwd: Path) -> Rank:
        """Fork a rank that runs ``command``, a script and its arguments, with its output in ``log``."""
        return fork(self.address, command, environment, log, cwd)

    def stop(self) -> None:
        """End it, and the ranks that are left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_ANSWER_WITHIN_S)


@dataclass(frozen=True)
class _Job:
    command: list[str]
    environment: dict[str, str]
    log: str
    cwd: str


@dataclass
class _Server:
    """Forks on request until its standard input ends; in a fork, :meth:`serve` returns what is to be done."""

    listener: socket.socket
    children: dict[int, socket.socket] = field(default_factory=dict)

    def serve(self) -> _Job | None:
        """The job of this process, in a fork; None at the end."""
        wake, woken = socket.socketpair()
        woken.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, lambda *_: None)  # of a terminal: the tests decide what ends
        with selectors.DefaultSelector() as selector:
            for source in (self.listener, wake, sys.stdin):
                selector.register(source, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is wake:
                        wake.recv(4096)
                        self._reap()
                    elif key.fileobj is self.listener:
                        job = self._fork()
                        if job is not None:
                            wake.close()
                            woken.close()
                            return job
                    else:
                        self._end()
                        return None

    def _fork(self) -> _Job | None:
        connection, _ = self.listener.accept()
        job = _Job(**json.loads(connection.recv(_MAX_REQUEST_BYTES)))
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for other in (self.listener, connection, *self.children.values()):
                other.close()
            return job
        self.children[pid] = connection
        connection.send(str(pid).encode())
        return None

    def _reap(self) -> None:
        for pid in list(self.children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                # Who asked for the rank may have been killed before it.
                with self.children.pop(pid) as connection, suppress(BrokenPipeError):
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _end(self) -> None:
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)


def _become(job: _Job) -> None:
    """Turn this process into the one that the job describes."""
    with Path("/dev/null").open("rb") as nothing, Path(job.log).open("ab") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.cwd)
    sys.argv = job.command
    sys.path[0] = str(Path(job.command[0]).parent)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _run(script: str) -> None:
    """Runs a script as the main program of this process, and ends the process."""
    status: str | int | None = None
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = end.code
    except Exception:  # noqa: BLE001 - as the interpreter does it
        sys.excepthook(*sys.exc_info())
        status = 1
    if FULL_END in os.environ:
        sys.exit(status)
    if isinstance(status, str):
        sys.stderr.write(f"{status}\n")
    threading._shutdown()  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def keep_docstrings() -> None:
    """Makes Megatron read its settings' help texts from their source once, and not for each parser: half a second."""
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    read = ArgumentGroupFactory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    def docstrings(factory: ArgumentGroupFactory, settings: type) -> dict[str, str]:
        if settings not in known:
            known[settings] = read(factory, settings)
        return known[settings]

    ArgumentGroupFactory._get_field_docstrings = docstrings
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def keep_sources() -> None:
    """Reads the functions of Megatron that each run checks once, and not in each rank."""
    from megatron_lancet.library.versions import check_megatron

    setattr(inspect, "getsource", functools.cache(inspect.getsource))  # noqa: B010 - mypy forbids to assign to it
    check_megatron()


def start_queue_of_saves() -> None:
    """Starts the process that Megatron starts at the first save, while it can be forked: anew it imports torch again.

    That would be most of a short run's time.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron_lancet.features.checkpoints.patches import queue_lives_with_the_rank

    with queue_lives_with_the_rank():
        filesystem_async.get_write_results_queue("fork")


def import_parts_of_models() -> None:
    """Imports the modules of runs with a plan: a fifth of a second for a rank."""
    from megatron_lancet import registry

    registry.model_parts()


def import_for_annotations() -> None:
    """Annotates once: torch 2.13 imports a module of its profiler for the first annotation of a process."""
    import torch

    with torch.profiler.record_function("first"):
        pass


def share_gloo_devices() -> None:
    """Makes all gloo groups of a rank use one device, and so one thread.

    By default each group has its own, which wakes up a hundred times a second. Four ranks in a layout with two hops
    have hundreds of groups, and spend more time on that than on the model.
    """
    from torch.distributed import ProcessGroupGloo

    stock = ProcessGroupGloo.__init__

    @functools.cache
    def device() -> Any:
        return ProcessGroupGloo.create_default_device()

    def init(
        group: Any, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None, **others: Any
    ) -> None:
        if options is None:
            options = ProcessGroupGloo._Options()
            options._devices = [device()]
            if timeout is not None:
                options._timeout = timeout
            # Since torch 2.14 there is a further argument. An option of its name has the same meaning; where there is
            # none, the options refuse the attribute.
            for name, value in others.items():
                setattr(options, name, value)
            others = {}
        stock(group, store, rank, size, options, **others)

    setattr(ProcessGroupGloo, "__init__", init)  # noqa: B010 - mypy forbids to assign to a method


NOT_IN_0_18 = ("megatron.training.models.gpt", "megatron.training.argument_utils")
"""Modules, or modules with names, that megatron-core 0.18 does not have: only the library runs there."""


def main() -> None:
    """Import, then fork on request."""
    address = Path(sys.argv[1])
    if _TE_FLAG in sys.argv[2:]:
        from tests import te_cpu

        te_cpu.install()
    for module in (*MODULES, *os.environ.get(MORE, "").split()):
        try:
            importlib.import_module(module)
        except ImportError as error:
            if error.name not in NOT_IN_0_18:
                raise
    keep_docstrings()
    keep_sources()
    import_parts_of_models()
    share_gloo_devices()
    import_for_annotations()
    gc.freeze()  # a collection in a fork would copy all pages
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        unready = address.with_suffix(".unready")
        listener.bind(str(unready))
        listener.listen(64)
        unready.rename(address)
        job = _Server(listener).serve()
    if job is not None:
        _become(job)
        if "--save" in job.command:
            start_queue_of_saves()
        _run(job.command[0])


if __name__ == "__main__":
    main()
