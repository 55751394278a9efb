"""A training of two or more ranks as the demo sees it: it asks for steps, and receives what each of them took."""

import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import STDOUT
from typing import Any

from benchmarks.demo.folder import REPOSITORY
from benchmarks.demo.links.link import Link, rank_cores
from benchmarks.demo.rank import READY
from benchmarks.demo.steps import RankStep
from benchmarks.demo.training_log.train_log import tail
from benchmarks.harness.namespaces import NUM_NODES, uninterrupted
from benchmarks.harness.ranks import end, rank_environment
from megatron_lancet.errors import UsageError

_RANK = "benchmarks.demo.rank"
_STEP_TIMEOUT_S = 120.0
_START_TIMEOUT_S = 240.0
_END_TIMEOUT_S = 240.0
_POLL_S = 0.2
_UNUSED = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "LANCET_SHAPED_IFNAME")


class Job:
    """The ranks of a training, from their start to their end; a context that ends them.

    Between two orders the ranks are stopped: each thread of a gloo group wakes up a hundred times a second, and the
    threads of ten idle jobs make another job five times slower.

    Attributes:
        name: for messages.
        log: gets everything that the ranks print.
    """

    def __init__(
        self,
        name: str,
        link: Link,
        flags: Sequence[str],
        log: Path,
        trace: Sequence[int] = (),
        options: Sequence[str] = (),
        module: str = _RANK,
        import_paths: Sequence[Path] = (),
        ranks_per_node: int = 1,
    ) -> None:
        """Starts the ranks.

        Args:
            flags: of Megatron and ours.
            trace: steps whose timelines are recorded.
            options: of ``module``.
            module: that each rank runs.
            import_paths: the ranks' ``PYTHONPATH``; empty for this repository alone.
            ranks_per_node: ranks on each side of the link; they share a core.
        """
        self.name = name
        self.log = log
        self._link = link
        self._module = module
        self._ranks_per_node = ranks_per_node
        self._paths = {"PYTHONPATH": os.pathsep.join(map(str, import_paths))} if import_paths else {}
        self._is_ready: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[tuple[int, RankStep]] = queue.SimpleQueue()
        self._ranks: list[subprocess.Popen[bytes]] = []
        options = [*options, *(["--trace", *map(str, trace)] if trace else [])]
        if link.interface is not None:
            options += ["--interface", link.interface]
        meet = link.rendezvous()
        with log.open("ab") as file:
            program = "pretrain_gpt_moe.py" if module == _RANK else module
            file.write(f"$ {name}: {program} {shlex.join(flags)}\n".encode())
            file.flush()
            try:
                cores = rank_cores()
                for rank in range(NUM_NODES * ranks_per_node):
                    core = cores[rank // ranks_per_node]
                    self._start(rank, ["--core", str(core), *options, *(["--", *flags] if flags else [])], meet, file)
            except BaseException:
                self.__exit__()
                raise

    def _start(self, rank: int, arguments: Sequence[str], meet: dict[str, str], file: Any) -> None:
        begin, end_of_pipe = os.pipe()
        command = [sys.executable, "-m", self._module, "--records", str(end_of_pipe), *arguments]
        environment = rank_environment(rank, ranks_per_node=self._ranks_per_node)
        environment = {name: value for name, value in environment.items() if name not in _UNUSED}
        environment |= meet | self._paths
        try:
            process = subprocess.Popen(
                self._link.command(rank // self._ranks_per_node, command),
                env=environment,
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=STDOUT,
                pass_fds=(end_of_pipe,),
                start_new_session=True,  # Ctrl-C is for the demo, which ends them
            )
        finally:
            os.close(end_of_pipe)
        self._ranks.append(process)
        threading.Thread(target=self._read, args=(rank, begin), daemon=True).start()

    def _read(self, rank: int, records: int) -> None:
        with os.fdopen(records) as lines:
            for line in lines:
                if line.startswith(READY):
                    self._is_ready.put(line.removeprefix(READY).strip())
                else:
                    self._found.put((rank, RankStep.parse(line)))

    def wait_until_ready(self) -> str:
        """Returns when the ranks are before their first step: what they did so far took time on the other's cores.

        Returns:
            The class of the model's core attention.

        Raises:
            UsageError: a rank ended, or took too long.
        """
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        late = f"{self.name} was not ready after {_START_TIMEOUT_S:.0f} s"
        attentions = {self._next(self._is_ready, deadline_s, late) for _ in self._ranks}
        self._signal(signal.SIGSTOP)
        return "+".join(sorted(attentions))

    def run(self, steps: range, on_step: Callable[[int, list[RankStep]], None]) -> None:
        """Lets the ranks run ``steps``, which follow those that they have run.

        Args:
            on_step: called with the number of each step and what it took on each rank.

        Raises:
            UsageError: a rank ended, or took too long.
        """
        self._order(steps[-1])
        for number in steps:
            on_step(number, self._receive(number))
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._ranks:
            if process.poll() is None:
                os.killpg(process.pid, number)

    def _order(self, until: int) -> None:
        """Lets the ranks go on up to a step."""
        self._signal(signal.SIGCONT)
        order = (json.dumps({"until": until, "rate_bps": self._link.paced_bps}) + "\n").encode()
        for process in self._ranks:
            assert process.stdin is not None
            try:
                process.stdin.write(order)
                process.stdin.flush()
            except BrokenPipeError:
                self._raise_if_ended()

    def _receive(self, number: int) -> list[RankStep]:
        found: dict[int, RankStep] = {}
        deadline_s = time.monotonic() + _STEP_TIMEOUT_S
        while len(found) < len(self._ranks):
            late = f"step {number} of {self.name} was not done after {_STEP_TIMEOUT_S:.0f} s"
            rank, step = self._next(self._found, deadline_s, late)
            assert step.step == number, (step.step, number)
            found[rank] = step
        return [found[rank] for rank in sorted(found)]

    def _next[Record](self, records: "queue.SimpleQueue[Record]", deadline_s: float, late: str) -> Record:
        """The next record.

        Args:
            late: what the message says when the deadline is over.
        """
        while True:
            try:
                return records.get(timeout=_POLL_S)
            except queue.Empty:
                self._raise_if_ended()
                if time.monotonic() > deadline_s:
                    raise UsageError(f"{late}. The end of {tail(self.log)}") from None

    def _raise_if_ended(self) -> None:
        statuses = [process.poll() for process in self._ranks]
        if any(status is not None for status in statuses) and self._found.empty():
            time.sleep(_POLL_S)
            if self._found.empty():
                raise UsageError(f"{self.name} ended early, with status {statuses}. The end of {tail(self.log)}")

    def finish(self) -> None:
        """Lets the ranks end after their last step, and waits for that.

        Raises:
            UsageError: one failed, or took too long.
        """
        self._order(sys.maxsize)
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        for rank, process in enumerate(self._ranks):
            try:
                status = process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise UsageError(
                    f"{self.name} was not done {_END_TIMEOUT_S:.0f} s after its last step. The end of {tail(self.log)}"
                ) from None
            if status != 0:
                raise UsageError(f"rank {rank} of {self.name} ended with status {status}. The end of {tail(self.log)}")

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        with uninterrupted():
            self._signal(signal.SIGTERM)  # all of them first: each may take a while
            self._signal(signal.SIGCONT)
            for process in self._ranks:
                end(process)
                assert process.stdin is not None
                process.stdin.close()
