"""Stands in for SLURM: sbatch, srun, scontrol and scancel as examples/slurm uses them, with tasks on this machine.

``slurm.py COMMAND ARGUMENTS...``. What SLURM's daemons remember is in the folder $SLURM_STAND_IN: ``batch`` (process of
the batch shell), ``tasks`` (processes that srun started), ``requeue`` (a file: the job is to start again). An option
that is not known is an error: a stand-in that takes anything would hide a wrong one.
"""

import argparse
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

JOB_ID = "4711"
HOSTS = ("localhost", "127.0.0.1")
"""Names of the "nodes"."""
_KILL_WAIT_S = 30.0
_POLL_S = 0.05
STATE = Path(os.environ["SLURM_STAND_IN"])


def sbatch(words: Sequence[str]) -> int:
    """Run a batch script here, again as often as it is requeued; its status is the last start's."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in ("--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--output", "--signal"):
        parser.add_argument(option)
    parser.add_argument("--open-mode", choices=["append"], required=True)
    for switch in ("--exclusive", "--requeue"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    script = next(Path(word) for word in words if word.endswith(".sbatch"))
    directives = re.findall(r"^#SBATCH (.*)$", script.read_text(), re.MULTILINE)
    options = parser.parse_args([*(word for line in directives for word in shlex.split(line)), *words])
    assert options.requeue
    assert re.fullmatch(r"B:USR1@\d+", options.signal)
    # As slurmd does: the script that runs lies elsewhere, and is what it was when it was submitted.
    spooled = STATE / "slurm_script"
    shutil.copy(options.script, spooled)
    environment = {
        **os.environ,
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_NNODES": options.nodes,
        "SLURM_JOB_NODELIST": ",".join(HOSTS[: int(options.nodes)]),
    }
    with Path(options.output.replace("%j", JOB_ID)).open("a") as output:
        for start in range(10):
            if start:
                environment["SLURM_RESTART_COUNT"] = str(start)
            batch = subprocess.Popen(
                ["bash", spooled, *options.arguments], env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            (STATE / "batch").write_text(str(batch.pid))
            status = batch.wait()
            if not (STATE / "requeue").exists():
                return status
            (STATE / "requeue").unlink()
    raise AssertionError("the job is requeued forever")


def srun(words: Sequence[str]) -> int:
    """One task on each node; when one fails the others are told to end, and killed if they don't."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--kill-on-bad-exit", choices=["1"], required=True)
    parser.add_argument("--cpu-bind", choices=["none"])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    command = parser.parse_args(words).command
    for processes in STATE.glob("node*"):
        processes.unlink()  # of the start before
    tasks = [
        subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(node)}, start_new_session=True)
        for node in range(int(os.environ["SLURM_NNODES"]))
    ]
    (STATE / "tasks").write_text(" ".join(str(task.pid) for task in tasks))
    kill_at_s = math.inf
    while None in (statuses := [task.poll() for task in tasks]):
        if kill_at_s == math.inf and any(statuses):
            kill_at_s = time.monotonic() + _KILL_WAIT_S
            _send(tasks, signal.SIGTERM)
        if time.monotonic() > kill_at_s:
            _send(tasks, signal.SIGKILL)
        time.sleep(_POLL_S)
    return max(map(abs, statuses))


def _send(tasks: Sequence[subprocess.Popen], number: signal.Signals) -> None:
    for task in tasks:
        if task.poll() is None:
            task.send_signal(number)


def scontrol(words: Sequence[str]) -> int:
    """``show hostnames LIST`` and ``requeue JOB``."""
    if words[:2] == ["show", "hostnames"]:
        sys.stdout.write("\n".join([*words[2].split(","), ""]))
        return 0
    assert words == ["requeue", JOB_ID], words
    (STATE / "requeue").touch()
    return 0


def scancel(words: Sequence[str]) -> int:
    """Signals the tasks, and nothing that they started: with control groups SLURM does no more."""
    assert words == ["--signal=TERM", JOB_ID], words
    for process in (STATE / "tasks").read_text().split():
        os.kill(int(process), signal.SIGTERM)
    return 0


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "scancel": scancel}[sys.argv[1]](sys.argv[2:]))
