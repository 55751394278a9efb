"""Runs the parts of the check, each in a process and within its limit. Neither torch nor Megatron.

A part with times runs alone; the others share the device. After each turn the summary is written anew, so a check that
is stopped leaves the results until then.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.check.parts import TOTAL_LIMIT_S, Part, turns
from benchmarks.gpu.check.predict.file import committed, hash_of, read_prediction
from benchmarks.gpu.check.summary import Ended, written
from benchmarks.gpu.record import read_records
from benchmarks.harness.origin import finished, origin

REPOSITORY = Path(__file__).parents[3]
_KILL_AFTER_S = 3.0
"""Time that a part gets to end after its limit, before it is killed."""
_LEAST_S = 5.0
"""A part does not begin when less time is left."""
_MODULE = "benchmarks.gpu.check"
_REHEARSAL_FACTOR = 6
"""A rehearsal may take as many times as long: the virtual GPU checks each access, on whatever processor there is."""


@dataclass(frozen=True)
class Check:
    """A run of the check.

    Attributes:
        folder: for the results: NAME.jsonl and NAME.log of each part, gpu-check.json and gpu-check.md.
        is_rehearsal: whether it runs on the virtual GPU.
        device: name of the device whose prediction is compared, for example ``H100``.
        environment: of the parts.
        commit: commit of the code where git can't say it.
        limit_s: of the whole check, in seconds.
    """

    folder: Path
    is_rehearsal: bool
    device: str
    environment: Mapping[str, str]
    commit: str | None = None
    limit_s: float = TOTAL_LIMIT_S
    _processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def run(self, parts: Sequence[Part]) -> bool:
        """Runs the parts; returns whether all have ended well.

        A signal to end (SIGTERM, Ctrl-C) stops the current part; the summary of the results so far is written.
        """
        end_s = time.monotonic() + self.limit_s * self._factor
        result = self._begin()
        ended: list[Ended] = []
        try:
            # A rehearsal may have two cores for all ranks.
            for turn in [[part] for part in parts] if self.is_rehearsal else turns(parts):
                ended += self._run_turn(
                    [replace(part, limit_s=part.limit_s * self._factor) for part in turn], end_s - time.monotonic()
                )
                self._save({**result, "machine_speed": None}, ended)  # known at the end
        finally:
            self._save(finished(result), ended)
        print(f"\n{(self.folder / 'gpu-check.md').read_text()}")
        return all(one.is_good for one in ended)

    @property
    def _factor(self) -> float:
        return _REHEARSAL_FACTOR if self.is_rehearsal else 1

    def _begin(self) -> dict[str, Any]:
        """Prints the prediction's hash before anything is measured; the fields with which the result begins."""
        path = committed(self.device)
        prediction = {"device": self.device, "sha256": hash_of(path), **read_prediction(path)}
        print(f"prediction for {self.device}: SHA-256 {prediction['sha256']} ({path.relative_to(REPOSITORY)})")
        found = origin("tools.check_gpu", environment=self.environment, packages=("triton", "numpy"))
        if found["commit"] is None and self.commit is not None:
            found |= {"commit": self.commit, "is_dirty": False}
        return {**found, "is_rehearsal": self.is_rehearsal, "prediction": prediction}

    def _run_turn(self, turn: Sequence[Part], left_s: float) -> list[Ended]:
        """Runs parts beside each other. An exception, by a signal too, ends their processes."""
        for part in turn:
            print(f"{part.name}: {part.title} (at most {min(part.limit_s, left_s):.0f} s)", flush=True)
        with ThreadPoolExecutor(len(turn)) as threads:
            try:
                running = [threads.submit(self._run, part, left_s) for part in turn]
                wait(running, return_when=FIRST_EXCEPTION)
                ended = [one.result() for one in running if one.done()]
            except BaseException:
                self._is_over.set()
                for process in self._processes:
                    end_group(process)
                raise
        for one in ended:
            print(f"  {one.name}: {one.told}", flush=True)
        return ended

    def _started(self, process: "subprocess.Popen[bytes]") -> None:
        self._processes.append(process)
        if self._is_over.is_set():
            end_group(process)

    def _run(self, part: Part, left_s: float) -> Ended:
        records = self.folder / f"{part.name}.jsonl"
        records.unlink(missing_ok=True)
        limit_s = min(part.limit_s, left_s)
        if limit_s < _LEAST_S:
            return Ended(part.name, part.title, None, 0.0, f"not begun: {max(left_s, 0):.0f} s were left", [])
        command = [sys.executable, "-m", _MODULE, part.name, str(records), "--limit", f"{limit_s - _KILL_AFTER_S:.1f}"]
        if self.is_rehearsal:
            command.append("--rehearse")
        start_s = time.monotonic()
        log = self.folder / f"{part.name}.log"
        status, why = run_limited(command, log, limit_s, self.environment, self._started)
        seconds = round(time.monotonic() - start_s, 1)
        return Ended(part.name, part.title, status, seconds, why, read_records(records))

    def _save(self, result: Mapping[str, Any], ended: Sequence[Ended]) -> None:
        """Writes both files anew, whole."""
        whole = {**result, "parts": [asdict(one) for one in ended]}
        _replace(self.folder / "gpu-check.json", json.dumps(whole) + "\n")
        _replace(self.folder / "gpu-check.md", written(whole))


def run_limited(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    environment: Mapping[str, str],
    started: Callable[["subprocess.Popen[bytes]"], None] = lambda process: None,
) -> tuple[int | None, str]:
    """Runs a command with its output in a file, and ends it and all that it has started at its limit.

    Args:
        started: gets the process.

    Returns:
        The exit status, None where it was ended; and why, empty where it ended by itself.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**environment},
            start_new_session=True,
        )
        started(process)
        try:
            return process.wait(limit_s), ""
        except subprocess.TimeoutExpired:
            why = f"stopped at its limit of {limit_s:.0f} s"
            output.write(f"\n{why}\n")
            return None, why
        finally:
            end_group(process)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Ends what is left of a process and its children: first by a request, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            continue


def _replace(path: Path, text: str) -> None:
    """Writes a file so that it is whole at any time."""
    new = path.with_suffix(f"{path.suffix}.new")
    new.write_text(text)
    new.replace(path)
