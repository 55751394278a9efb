"""How a rank's process ends; each case in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

PREAMBLE = """
import os, signal, sys, threading, time
from megatron_lancet.errors import CheckpointError, PeerError, UsageError
from megatron_lancet.training.process.exit import run_rank

def main(status):
    status.describe = lambda: "2 steps done, waiting for L1.c0.F.dispatch"
"""


def ended(body: str, rank: int = 0, start_new_session: bool = False) -> subprocess.CompletedProcess:
    """Runs ``body`` as a rank's main."""
    script = PREAMBLE + textwrap.indent(textwrap.dedent(body), "    ") + "\nrun_rank(main)\nprint('after')\n"
    env = {**os.environ, "RANK": str(rank)}
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=60, start_new_session=start_new_session
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_rank_with_one_line(number):
    done = ended(f"os.kill(os.getpid(), {int(number)}); time.sleep(60)", rank=3)
    assert done.returncode == 128 + number
    assert done.stderr == f"error: {number.name} ended rank 3, 2 steps done, waiting for L1.c0.F.dispatch\n"
    assert done.stdout == ""


def test_signal_ends_a_rank_whose_main_thread_waits():
    """With a long switch interval, the other thread runs only while the main thread waits."""
    body = """
        def interrupt():
            gate.acquire()
            os.kill(os.getpid(), signal.SIGINT)
        gate, never = threading.Lock(), threading.Lock()
        gate.acquire()
        never.acquire()
        threading.Thread(target=interrupt, daemon=True).start()
        sys.setswitchinterval(1000)
        gate.release()
        never.acquire()
    """
    assert ended(body).returncode == 128 + signal.SIGINT


def test_later_signal_handler_takes_precedence():
    """Megatron's --exit-signal-handler saves a checkpoint at SIGTERM. The rank's own thread has also seen the
    signal when ``run_rank`` returns."""
    body = """
        signal.signal(signal.SIGTERM, lambda *_: print("saved", flush=True))
        signal.raise_signal(signal.SIGTERM)
    """
    done = ended(body)
    assert (done.returncode, done.stdout) == (0, "saved\nafter\n")


def test_forked_child_handles_its_own_signals():
    """A data loader's worker that is stopped must not end the training."""
    body = """
        started, tells = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tells, b"1")
            time.sleep(60)
        os.read(started, 1)
        os.kill(child, signal.SIGTERM)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    done = ended(body)
    assert (done.returncode, done.stdout) == (0, f"child {-signal.SIGTERM}\nafter\n")


def test_sigterm_that_is_handled_does_not_end_the_rank():
    """Schedulers signal every process: a child that writes a checkpoint goes on too; a daemon need not."""
    body = """
        import multiprocessing
        fork = multiprocessing.get_context("fork")
        asked = threading.Event()
        status.on_sigterm = asked.set
        started, others_are_done = fork.Semaphore(0), fork.Event()
        def write():
            started.release()
            others_are_done.wait()
        def load():
            started.release()
            while True:  # a signal just before a long sleep would be handled only after it
                time.sleep(0.05)
        writer, loader = fork.Process(target=write), fork.Process(target=load, daemon=True)
        for child in (writer, loader):
            child.start()
        for child in (writer, loader):
            started.acquire()
        os.killpg(0, signal.SIGTERM)
        asked.wait()
        loader.join()
        others_are_done.set()
        writer.join()
        print("exit statuses", writer.exitcode, loader.exitcode)
    """
    done = ended(body, start_new_session=True)
    assert (done.returncode, done.stdout) == (0, f"exit statuses 0 {128 + signal.SIGTERM}\nafter\n")


def test_failed_checkpoint_ends_with_one_line():
    done = ended("raise CheckpointError('the disk is full')")
    assert (done.returncode, done.stderr) == (1, "error: the disk is full\n")


def test_lost_peer_ends_with_one_line():
    done = ended("raise PeerError('rank 0 gave up on L1.c0.F.dispatch')")
    assert (done.returncode, done.stderr) == (1, "error: rank 0 gave up on L1.c0.F.dispatch\n")


def test_unexpected_error_prints_traceback_and_exits_at_once():
    """Without Python's clean-up, which would wait: here for a thread, in a training for other ranks."""
    done = ended("threading.Thread(target=time.sleep, args=(60,)).start(); print('unflushed'); [][0]")
    assert done.returncode == 1
    assert done.stdout == "unflushed\n"
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith(
        "error: rank 0, 2 steps done, waiting for L1.c0.F.dispatch: IndexError: list index out of range\n"
    )


@pytest.mark.parametrize("worker", ["Process(target=time.sleep, args=(90,), daemon=True).start()", "Manager()"])
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", "raise RuntimeError"])
def test_data_workers_end_with_their_rank(end, worker):
    """A worker that goes on would keep the rank's sockets open, and the output pipe here."""
    body = f"""
        import multiprocessing
        kept = multiprocessing.get_context("fork").{worker}
        {end}
    """
    assert ended(body).returncode != 0


def test_closed_output_does_not_keep_a_rank_from_exiting():
    assert ended("print('unread', end=''); os.close(1); raise RuntimeError").returncode == 1


@pytest.mark.parametrize(("code", "status"), [("0", 0), ("16", 16), ("", 0), ("'reason'", 1)])
def test_exit_status_is_kept(code, status):
    done = ended(f"sys.exit({code})")
    assert done.returncode == status
    assert ("reason" in done.stderr) == ("reason" in code)


def test_refused_input_ends_with_one_line():
    done = ended("raise UsageError('expected this')")
    assert (done.returncode, done.stderr) == (2, "error: expected this\n")


def test_signal_handlers_are_restored():
    script = (
        PREAMBLE + "    pass\nrun_rank(main)\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("body", "line", "seconds_later"),
    [
        ("raise UsageError('expected this')", "error: expected this", 0),
        ("raise CheckpointError('the disk is full')", "error: the disk is full", 0),
        ("[][0]", "error: rank 0, 2 steps done, waiting for L1.c0.F.dispatch: IndexError: list index out of range", 0),
        ("raise PeerError('rank 1 is gone')", "error: rank 1 is gone", 1),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", "SIGTERM ended rank 0, 2 steps done, waiting for ", 1),
    ],
    ids=["refused", "checkpoint", "unexpected", "peer", "signal"],
)
def test_launcher_gets_the_line_and_the_time_of_the_cause(tmp_path, monkeypatch, body, line, seconds_later):
    """torchrun reports the earliest failure as the cause: a rank that only follows another one has a later time."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    noted = tmp_path / "started"
    ended(f"print(int(time.time()), file=open({str(noted)!r}, 'w'), flush=True)\n{body}")
    message = json.loads(file.read_text())["message"]
    assert message["extraInfo"]["py_callstack"] == message["message"]
    assert message["message"].startswith(line)
    least_s = int(noted.read_text()) + seconds_later
    assert least_s <= int(message["extraInfo"]["timestamp"])


def test_launcher_keeps_the_first_line_of_a_rank(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    file.write_text("earlier")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert ended("raise UsageError('expected this')").returncode == 2
    assert file.read_text() == "earlier"


def test_rank_that_was_asked_to_stop_does_not_repeat_the_line(monkeypatch):
    """Its launcher stops it because local rank 0 has ended with this line; Megatron's handler only takes a note."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    body = """
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.raise_signal(signal.SIGTERM)
        while not status.is_stopping:
            time.sleep(0.01)
        status.describe = None
        raise UsageError("expected this")
    """
    done = ended(body)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")
