"""Outputs appear together or not at all, however the writing ends."""

import os
import signal
import threading
from pathlib import Path

import pytest

from megatron_lancet.files.atomic import atomic_outputs, atomic_write


def send_and_wait(number: signal.Signals) -> None:
    """Sends a signal to the process; returns after one of its threads has received it."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    previous = signal.set_wakeup_fd(write_end)
    try:
        os.kill(os.getpid(), number)
        assert os.read(read_end, 1) == bytes([number])
    finally:
        signal.set_wakeup_fd(previous)
        os.close(read_end)
        os.close(write_end)


def test_atomic_outputs_appear_together_after_the_body(tmp_path: Path) -> None:
    targets = [tmp_path / "a.bin", tmp_path / "a.idx"]
    targets[0].write_text("old")
    with atomic_outputs(*targets) as temporaries:
        for temporary in temporaries:
            temporary.write_text(f"new {temporary.name}")
            assert temporary.parent == tmp_path
        assert targets[0].read_text() == "old"
        assert not targets[1].exists()
    assert [target.read_text()[:3] for target in targets] == ["new", "new"]
    assert sorted(tmp_path.iterdir()) == targets


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_atomic_outputs_keep_old_files_after_an_error(tmp_path: Path, failure: type[BaseException]) -> None:
    targets = [tmp_path / "a.bin", tmp_path / "a.idx"]
    targets[0].write_text("old")

    def write_half() -> None:
        with atomic_outputs(*targets) as temporaries:
            temporaries[0].write_text("half")
            raise failure

    with pytest.raises(failure):
        write_half()
    assert targets[0].read_text() == "old"
    assert list(tmp_path.iterdir()) == [targets[0]]


def test_sigterm_removes_temporary_files(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def write_until_terminated() -> None:
        with atomic_outputs(tmp_path / "a") as (temporary,):
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as exit_info:
        write_until_terminated()
    assert exit_info.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_interrupt_between_renames_is_raised_after_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def replace_and_interrupt(source: Path, target: Path) -> None:
        replace(source, target)
        send_and_wait(signal.SIGINT)

    monkeypatch.setattr(os, "replace", replace_and_interrupt)
    targets = [tmp_path / "a.bin", tmp_path / "a.idx"]
    done = threading.Event()
    other = threading.Thread(target=done.wait)  # the signal may reach the process through any thread
    other.start()

    def write_empty_files() -> None:
        with atomic_outputs(*targets) as temporaries:
            for temporary in temporaries:
                temporary.touch()

    try:
        with pytest.raises(KeyboardInterrupt):
            write_empty_files()
    finally:
        done.set()
        other.join()
    assert sorted(tmp_path.iterdir()) == targets


def test_sigterm_handler_of_caller_is_kept_and_file_is_written(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, _: received.append(signum))
    try:
        with atomic_outputs(tmp_path / "a") as (temporary,):
            temporary.write_text("whole")
            send_and_wait(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    assert (tmp_path / "a").read_text() == "whole"


def test_atomic_write_replaces_text_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    atomic_write(path, b"old")
    atomic_write(path, "new é")
    assert path.read_bytes() == "new é".encode()
    with pytest.raises(FileNotFoundError):
        atomic_write(tmp_path / "missing" / "a", "x")
    assert list(tmp_path.iterdir()) == [path]
