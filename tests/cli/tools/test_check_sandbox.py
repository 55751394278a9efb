"""Launch scripts with harmful commands that have no stand-in: none may have an effect."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.launch import launch as launches
from megatron_lancet.lab.launch.isolated import script
from megatron_lancet.lab.launch.isolated.script import NotIsolatedError
from megatron_lancet.lab.launch.launch import launch_of_script

LAUNCH = "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2"
KINDS = ("tmp", "home", "current", "shm", "mounted")
HARM = (
    """#!/bin/bash
for folder in {folders}; do
    /bin/rm -rf $folder/removed
    find $folder -name found -delete
    dd if=/dev/zero of=$folder/written bs=1 count=9
    truncate -s 0 $folder/truncated
    echo more >> $folder/appended
    echo new > $folder/new
    perl -e 'unlink shift' $folder/unlinked
    chmod 000 $folder/locked
    /bin/mv $folder/moved $folder/away
done
/bin/kill -9 {pid}
python - <<'CODE'
import socket
for address in (("127.0.0.1", {port}), "{unix}", "\\0{abstract}"):
    try:
        with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as one:
            one.connect(address)
        print("connected to", address)
    except OSError:
        print("refused")
a, b = socket.socketpair()
CODE
mkdir -p logs/deep && echo fine > logs/deep/file && cat logs/deep/file | tee logs/copy
"""
    + LAUNCH
)
NAMES = ("removed", "found", "written", "truncated", "appended", "unlinked", "locked", "moved")


def filled(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / name).write_text("of the user")
    return folder


def state(folder: Path) -> dict[str, tuple[str, int]]:
    return {one.name: (one.read_text(), one.stat().st_mode) for one in folder.iterdir() if one.is_file()}


@contextmanager
def mounted(folder: Path):
    """Mounts a separate file system at the folder if the user may mount: a bind of its parent does not include it."""
    folder.mkdir()
    is_mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True, check=False)
    try:
        yield folder
    finally:
        if is_mounted.returncode == 0:
            subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def listeners(folder: Path):
    """Listening sockets of this process: on the loopback, at a path, and with an abstract name."""
    abstract = f"lancet-{os.getpid()}"
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_UNIX) as hidden:
        tcp.bind(("127.0.0.1", 0))
        unix.bind(str(folder / "service"))
        hidden.bind(f"\0{abstract}")
        for one in (tcp, unix, hidden):
            one.listen()
            one.setblocking(False)
        yield (tcp, unix, hidden), {"port": tcp.getsockname()[1], "unix": folder / "service", "abstract": abstract}


def test_harm_of_a_script_has_no_effect(tmp_path, monkeypatch):
    home, shm = tmp_path / "home", Path("/dev/shm") / f"lancet-{os.getpid()}"
    current = tmp_path / "current"
    monkeypatch.setenv("HOME", str(home))
    with mounted(tmp_path / "mount") as mount, listeners(tmp_path) as (sockets, where):
        kept = [filled(folder) for folder in (tmp_path / "tmp", home, current, shm, mount / "inner")]
        monkeypatch.chdir(current)
        with subprocess.Popen(["sleep", "100"]) as bystander:
            try:
                script = tmp_path / "train.sh"
                folders = " ".join(map(str, kept))
                script.write_text(HARM.format(folders=folders, pid=bystander.pid, **where))
                before = [state(folder) for folder in kept]
                found = launch_of_script(script, [])
                assert bystander.poll() is None
                assert [state(folder) for folder in kept] == before
            finally:
                bystander.send_signal(signal.SIGKILL)
                subprocess.run(["rm", "-rf", str(shm)], check=True)
        for one in sockets:
            with pytest.raises(BlockingIOError):
                one.accept()
    assert found.words == ["--num-layers", "2"]
    assert not (current / "logs").exists()


def test_script_sees_no_process_no_device_and_no_rights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.sh"
    script.write_text(
        "LC_ALL=C; echo $(ls /dev) / $(ls -d /proc/[0-9]* | wc -l) / $(grep -c '^Cap.*:.*[1-9a-f]' /proc/self/status) /"
        " $( (echo > /usr/mine) 2>&1)\n"
    )
    with pytest.raises(UsageError, match="started no training") as refusal:
        launch_of_script(script, [])
    devices, processes, rights, usr = str(refusal.value).partition("printed: ")[2].split(" / ")
    assert devices == "fd full null random shm stderr stdin stdout urandom zero"
    assert int(processes) < 10
    assert rights == "0"
    assert "Read-only file system" in usr


def test_python_under_a_launcher_never_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import time\nprint('it trains')\ntime.sleep(100)\n")
    (tmp_path / "train.sh").write_text("srun -n 16 python train.py --config model.json")
    found = launch_of_script(tmp_path / "train.sh", [])
    assert (found.words, found.num_ranks) == (["--config", "model.json"], 16)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("name", ["torchrun", "python -m torch.distributed.run"])
def test_launchers_of_a_virtual_environment_never_start(tmp_path, monkeypatch, name, trusted):
    monkeypatch.chdir(tmp_path)
    tools, started = tmp_path / "venv" / "bin", tmp_path / "started"
    tools.mkdir(parents=True)
    (tools / "torchrun").write_text(f"#!/bin/sh\necho > {started}\n")
    (tools / "torchrun").chmod(0o755)
    (tools / "python").symlink_to(sys.executable)
    command = name if name == "torchrun" else f"{tools}/{name}"  # the whole path: no stand-in has its name
    (tmp_path / "pretrain.py").write_text(f"open({str(started)!r}, 'w')\n")
    script = tmp_path / "train.sh"
    script.write_text(f'PATH="{tools}:$PATH"\nexport PYTHONPATH=/x\n{command} --nproc-per-node 2 pretrain.py --lr 1\n')
    found = launch_of_script(script, [], trusted=trusted)
    assert (found.words, found.num_ranks) == (["--lr", "1"], 2)
    assert not started.exists()


def test_commands_of_a_script_see_their_own_status(tmp_path, monkeypatch):
    """Bash looks after the stand-ins before each command, which no command may notice."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text(
        "set -xu\nfalse | true\nboth=${PIPESTATUS[*]}\n(exit 7)\ntorchrun pretrain.py $? $both $(echo a | cat)\n"
    )
    assert launch_of_script(tmp_path / "train.sh", []).words == ["7", "1", "0", "a"]


LOOP = "while true; do sleep 1; done"


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("text", [f"{LOOP} &\n{LAUNCH} &", f"{LAUNCH}\n{LOOP}"], ids=["background", "foreground"])
def test_launch_of_a_script_that_goes_on_is_read(tmp_path, monkeypatch, text, trusted):
    """The sandbox ends background processes soon after the script, and the script at the limit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "LIMIT_S", 60.0 if text.startswith(LOOP) else 10.0)
    (tmp_path / "train.sh").write_text(text)
    start_s = time.monotonic()
    assert launch_of_script(tmp_path / "train.sh", [], trusted=trusted).num_ranks == 8
    assert time.monotonic() - start_s < 40


@pytest.mark.parametrize("trusted", [False, True])
def test_script_that_never_launches_is_ended(tmp_path, monkeypatch, trusted):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "LIMIT_S", 2.0)
    (tmp_path / "train.sh").write_text(f"false\n{LOOP}")
    with pytest.raises(UsageError, match="ran for over 2 s without any training"):
        launch_of_script(tmp_path / "train.sh", [], trusted=trusted)


@pytest.fixture
def _without_namespaces(monkeypatch):
    """A machine without isolation."""
    run_script = launches.run_script

    def run(script, arguments, defaults, isolated):
        if isolated:
            raise NotIsolatedError("Operation not permitted")
        return run_script(script, arguments, defaults, isolated)

    monkeypatch.setattr(launches, "run_script", run)


@pytest.mark.usefixtures("_without_namespaces")
@pytest.mark.parametrize(("answer", "runs"), [("y\n", True), ("\n", False), (None, False)])
def test_script_that_cannot_be_isolated_needs_consent(tmp_path, monkeypatch, capsys, answer, runs):
    class Terminal:
        def isatty(self) -> bool:
            return answer is not None

        def readline(self) -> str:
            assert answer is not None, "nobody is asked"
            return answer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launches.sys, "stdin", Terminal())
    monkeypatch.setattr(launches.sys.stderr, "isatty", lambda: True, raising=False)
    script = tmp_path / "train.sh"
    script.write_text(LAUNCH)
    if runs:
        assert launch_of_script(script, []).num_ranks == 8
        assert "(Operation not permitted). Run it anyway? [y/N]" in capsys.readouterr().err
        return
    with pytest.raises(UsageError, match="--trust-script" if answer is None else "was not run"):
        launch_of_script(script, [])
    assert launch_of_script(script, [], trusted=True).num_ranks == 8
