"""The job script of examples/slurm under a stand-in for SLURM: two nodes on this machine, a dead node, a time limit."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.distributed

STAND_INS = Path(__file__).with_name("stand_ins")
JOB_SCRIPT = "examples/slurm/train.sbatch"
EXAMPLE = "examples/tiny_cpu.sh"
MANY_ITERS, LAST_ITERS, SAVE_EVERY = 2000, 3, 10
RUN = "--log-interval 1 --num-workers 0 --lancet-cache off --lancet-num-chunks 2".split()
ENDS_IN_START_2 = f"""
latest=$CHECKPOINTS/latest_checkpointed_iteration.txt
if [ "${{SLURM_RESTART_COUNT:-0}}" -lt 2 ]; then
    set -- --train-iters {MANY_ITERS} "$@"
else
    set -- --train-iters "$(($(cat "$latest") + {LAST_ITERS}))" --override-opt_param-scheduler "$@"
fi
exec sh {EXAMPLE} "$@"
"""
"""The first two starts train until the test ends them, however late it does."""
WITHIN_S = 90.0
JOB_WITHIN_S = 150.0


@dataclass(frozen=True)
class Job:
    """A job of two nodes with one rank each.

    Attributes:
        folder: where it was submitted.
        state: the stand-in's.
        process: sbatch, which waits for the job's end.
    """

    folder: Path
    state: Path
    process: subprocess.Popen

    @property
    def output(self) -> str:
        file = self.folder / "slurm-4711.out"
        return file.read_text() if file.exists() else ""

    def log(self, start: int, rank: int) -> str:
        file = self.folder / "runs" / "slurm" / "4711" / f"start_{start}" / f"rank_{rank:04d}.log"
        return file.read_text() if file.exists() else ""

    def losses(self, start: int) -> dict[int, str]:
        """Loss of each iteration of a start, as it was printed; Megatron's last rank prints them."""
        lines = re.findall(r"\] iteration +(\d+)/.* lm loss: (\S+)", self.log(start, 1))
        return {int(iteration): loss for iteration, loss in lines}

    def latest_checkpoint(self) -> int:
        return int((self.folder / "runs" / "tiny_cpu" / "latest_checkpointed_iteration.txt").read_text())

    def wait_for(self, what: str, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WITHIN_S
        while not holds():
            assert self.process.poll() is None, f"the job ended before {what}:\n{self.everything()}"
            assert time.monotonic() < deadline_s, f"still waiting for {what}:\n{self.everything()}"
            time.sleep(0.02)

    def kill_node(self, node: int) -> None:
        """What a power cut does."""
        file = self.state / f"node{node}"
        for process in file.read_text().split() if file.exists() else ():
            try:
                command_line = Path(f"/proc/{process}/cmdline").read_text()
                if f"{launch.REPO}/tests/ranks/" in command_line:  # else it ended, and another got its number
                    os.kill(int(process), signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                continue

    def end(self) -> int:
        """Waits for it; its status."""
        return self.process.wait(JOB_WITHIN_S)

    def everything(self) -> str:
        logs = sorted(self.folder.glob("runs/slurm/4711/*/*.log"))
        return "\n".join([self.output, *(f"--- {log}\n{log.read_text()[-3000:]}" for log in logs)])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Mapping[str, str]:
    """An environment with SLURM's commands and with a Python that needs no time for imports."""
    server = launch.preloaded()
    bin_folder = tmp_path_factory.mktemp("bin")
    commands = {name: [STAND_INS / "slurm.py", name] for name in ("sbatch", "srun", "scontrol", "scancel")}
    commands["python"] = [STAND_INS / "python.py"]
    for name, command in commands.items():
        words = " ".join(f"'{word}'" for word in (sys.executable, "-S", "-E", *command))
        (bin_folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (bin_folder / name).chmod(0o755)
    own = ("SLURM", "NNODES", "RDZV", "LOG_DIR", "CHECKPOINTS")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {
        **inherited,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHON": str(bin_folder / "python"),
        "PRELOADED": str(server.address),
        "GPUS_PER_NODE": "1",
        "SAVE_INTERVAL": str(SAVE_EVERY),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60",
    }


def submit(cluster: Mapping[str, str], folder: Path, *arguments: str, example: str = EXAMPLE) -> Job:
    state = folder / "slurm"
    state.mkdir()
    (folder / "examples").symlink_to(launch.REPO / "examples")
    process = subprocess.Popen(
        ["sbatch", "--nodes", "2", JOB_SCRIPT, example, *arguments],
        cwd=folder,
        env={**cluster, "SLURM_STAND_IN": str(state)},
    )
    return Job(folder, state, process)


@pytest.fixture(scope="module")
def job(cluster, tmp_path_factory) -> Job:
    """Start 0 loses a node after a checkpoint, start 1 comes near the time limit, start 2 trains to the end."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "tiny_cpu.sh").write_text(ENDS_IN_START_2)
    job = submit(cluster, folder, *RUN, example="tiny_cpu.sh")
    try:
        job.wait_for("a step after a checkpoint", lambda: SAVE_EVERY + 1 in job.losses(0))
        job.kill_node(1)
        job.wait_for("the second start's steps", lambda: len(job.losses(1)) >= 3)
        os.kill(int((job.state / "batch").read_text()), signal.SIGUSR1)
        job.end()
    finally:
        if job.process.poll() is None:
            job.process.kill()
            for node in (0, 1):
                job.kill_node(node)
    assert job.process.returncode == 0, job.everything()
    return job


def test_slurm_nodes_join_one_run(job):
    assert "start 0 on 2 nodes x 1 ranks, meeting at localhost:24711; latest checkpoint: none" in job.output
    for start in range(3):
        assert "using world size: 2, data-parallel size: 2," in job.log(start, 0)
        assert job.losses(start)  # from the other rank's log
    assert sorted(one.name for one in (job.folder / "runs/slurm/4711/start_0").iterdir()) == [
        "rank_0000.log",
        "rank_0001.log",
    ]


def test_slurm_job_restarts_after_a_dead_node(job):
    assert re.search(r"^error: .*rank [01]", job.output, re.MULTILINE), job.everything()
    assert re.search(r"failed with status \d+ after a new checkpoint, \d+; back into the queue", job.output)
    assert re.search(r"start 1 on 2 nodes .* latest checkpoint: \d+;", job.output)


def test_slurm_restart_resumes_from_the_latest_checkpoint(job):
    resumed_from = min(job.losses(1)) - 1
    assert resumed_from % SAVE_EVERY == 0
    assert f"new checkpoint, {resumed_from};" in job.output
    twice = job.losses(0).keys() & job.losses(1).keys()
    assert {one: job.losses(1)[one] for one in twice} == {one: job.losses(0)[one] for one in twice}


def test_slurm_job_saves_and_requeues_before_the_time_limit(job):
    last = max(job.losses(1))
    assert job.output.count("time limit ahead: asking all ranks to save and leave") == 1
    assert f"latest checkpoint: {last}; back into the queue" in job.output
    assert min(job.losses(2)) == last + 1
    assert "exiting program after receiving SIGTERM" in job.log(1, 0)


def test_slurm_job_trains_to_the_end_after_its_restarts(job):
    last = max(job.losses(1)) + LAST_ITERS
    assert max(job.losses(2)) == last == job.latest_checkpoint()
    assert f"training is done; latest checkpoint: {last}" in job.output


def test_slurm_job_with_a_wrong_flag_is_not_restarted(cluster, tmp_path):
    job = submit(cluster, tmp_path, "--no-such-flag")
    assert job.end() != 0
    lines = [line for line in job.output.splitlines() if line.startswith("error: ")]  # torchrun's reports repeat it
    assert len(lines) == 1, job.everything()
    assert lines[0].startswith("error: unrecognized arguments: --no-such-flag")
    assert "no new checkpoint since none: not started again" in job.output
    assert "start 1" not in job.output


SLOW_TO_SAVE = """
[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || exit 0
save() {
    sleep 1
    if [ "$FITS" = yes ]; then
        mkdir -p "$CHECKPOINTS"
        echo 7 >"$CHECKPOINTS/latest_checkpointed_iteration.txt"
    fi
    echo "node $SLURM_NODEID ends"
    exit 3
}
trap save TERM
echo ready
while :; do sleep 0.02; done
"""


@pytest.mark.parametrize("fits", [True, False])
def test_slurm_job_lets_ranks_save_at_repeated_signals(cluster, tmp_path, fits):
    """Without a new checkpoint it does not start again: each start would train the same steps."""
    (tmp_path / "slow.sh").write_text(SLOW_TO_SAVE)
    job = submit({**cluster, "FITS": "yes" if fits else "no"}, tmp_path, example="slow.sh")
    job.wait_for("both nodes", lambda: job.output.count("ready") == 2)
    for _ in range(2):
        os.kill(int((job.state / "batch").read_text()), signal.SIGUSR1)
        job.wait_for("the trap", lambda: "time limit ahead" in job.output)
    assert job.end() == (0 if fits else 3)
    assert job.output.count("time limit ahead") == 1
    words = "latest checkpoint: 7; back into the queue" if fits else "no new checkpoint since none: not started again"
    assert job.output.rindex("ends") < job.output.index(words)
    assert ("a step and a save must fit" in job.output) is not fits
    assert ("start 1" in job.output) is fits
