"""Runs a command that cannot change the user's files: ``python sandbox.py SCRATCH RECORD_FD COMMAND ...``.

The command sees all files read-only, and no devices except ``/dev/null`` and similar ones. It has its own processes,
host name and empty network, and no capabilities. It cannot connect to Unix sockets. Its writes to the current folder,
``$HOME``, ``/tmp``, ``/dev/shm`` and ``SCRATCH`` go to memory and are lost when it ends. Then ``SCRATCH/record`` is
copied to the descriptor. If the system does not allow all of this, the command does not run, and the descriptor gets a
line of JSON with ``error``.

This file runs in its own interpreter and needs Linux 5.12. It imports nothing from the project.
"""

import ctypes
import json
import os
import platform
import re
import signal
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path

NOT_ISOLATED = 125
"""Exit status if the isolation fails."""
GRACE_S = 5
"""Time that processes in the background have to start their training after the command has ended."""
RECORD, WORK, TEMPORARY = "record", "work", "tmp"
"""Names in the scratch folder."""
_MAX_RECORD_BYTES = 1 << 24
_SIZES = "mode=0755,size=256m,nr_inodes=100k"
"""Limits of an in-memory file system, which a script may fill."""

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_MOVE, _MS_REC, _MS_PRIVATE = (
    *(1, 2, 4, 8, 1 << 12, 1 << 13, 1 << 14, 1 << 18),
)
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_RDONLY, _NOSUID, _NODEV = 1, 2, 4
_PDEATHSIG, _CAPBSET_DROP, _SET_SECCOMP, _NO_NEW_PRIVS, _CAP_AMBIENT = 1, 24, 22, 38, 47
_CAP_AMBIENT_CLEAR_ALL, _SECCOMP_MODE_FILTER, _CAPABILITY_VERSION = 4, 2, 0x20080522
_DEVICES = ("null", "zero", "full", "random", "urandom")

_CALLS = {
    "x86_64": (0xC000003E, 41, 53, (248, 249, 250)),
    "aarch64": (0xC00000B7, 198, 199, (217, 218, 219)),
}
"""For each machine: its number in kernel filters, and the numbers of socket, socketpair and the key calls."""
_IO_URING_SETUP = 425
_OTHER_TABLES = 0x40000000
"""System calls from this number on belong to the x32 table, which has other numbers."""
_OWN_FAMILIES = (2, 10, 16)
"""IPv4, IPv6 and netlink, which reach only the command's own network."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    source_, target_, kind_, data_ = (
        None if text is None else os.fsencode(text) for text in (source, target, kind, data)
    )
    _call(f"mount {target}", _libc.mount(source_, target_, kind_, ctypes.c_ulong(flags), data_))


def _change_mount(path: str, added: int, removed: int, recursively: bool) -> None:
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", added, removed, 0, 0))
    flags = _AT_RECURSIVE if recursively else 0
    arguments = ctypes.c_long(_MOUNT_SETATTR), _AT_FDCWD, os.fsencode(path), flags, attributes, ctypes.c_size_t(32)
    _call(f"mount_setattr {path}", _libc.syscall(*arguments))


def _prctl(option: int, first: int, second: object = 0) -> None:
    arguments = ctypes.c_ulong(first), ctypes.c_ulong(second) if isinstance(second, int) else second
    _call(f"prctl {option}", _libc.prctl(option, *arguments, ctypes.c_ulong(0), ctypes.c_ulong(0)))


def enter_namespaces() -> None:
    """Leaves the caller's network, processes and mounts; uses a user namespace if that needs one."""
    own = os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWPID | os.CLONE_NEWIPC | os.CLONE_NEWUTS
    user, group = os.geteuid(), os.getegid()
    try:
        os.unshare(own)
    except PermissionError:
        os.unshare(own | os.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _prctl(_PDEATHSIG, signal.SIGKILL)


def close_files(scratch: Path) -> Path:
    """Makes all mounts read-only, disables their devices, and mounts the folders that the command may write to.

    Returns:
        The command's start folder: the current folder, or a folder with links to its entries.
    """
    current = Path.cwd()
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _change_mount("/", _RDONLY | _NOSUID | _NODEV, 0, recursively=True)
    _mount("tmpfs", str(scratch), "tmpfs", _MS_NOSUID | _MS_NODEV, _SIZES)
    _mount_devices(scratch / "dev")
    folders = [current, Path(os.environ.get("HOME", "/")), Path("/tmp")]  # noqa: S108 the script may write there
    opened = _mount_copies([folder.resolve() for folder in folders], scratch)
    (scratch / TEMPORARY).mkdir()
    if any(current.is_relative_to(folder) for folder in opened):
        return current
    work = scratch / WORK
    work.mkdir()
    link_entries(current, work)
    return work


def _mount_devices(devices: Path) -> None:
    """Mounts a ``/dev`` with the devices that scripts use."""
    devices.mkdir()
    _mount("tmpfs", str(devices), "tmpfs", _MS_NOSUID | _MS_NODEV, _SIZES)
    for name in _DEVICES:
        (devices / name).touch()
        _mount(f"/dev/{name}", str(devices / name), None, _MS_BIND)
        _change_mount(str(devices / name), 0, _NODEV, recursively=False)  # stays read-only: nobody changes its mode
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (devices / name).symlink_to(f"/proc/self/{target}")
    (devices / "shm").mkdir()
    _mount(str(devices), "/dev", None, _MS_MOVE)


def _mount_copies(folders: list[Path], scratch: Path) -> list[Path]:
    """Mounts overlays on folders, which keep writes in memory; returns the folders with an overlay.

    An overlay would hide other mounts below it, and a kernel may refuse an overlay of some file systems: such folders
    stay read-only. The last overlay may hide the scratch folder, where the others keep their writes.
    """
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [Path(re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), line.split()[4])) for line in lines]
    points = [point for point in points if not point.is_relative_to(scratch)]
    opened: list[Path] = []
    ordered = sorted(set(folders), key=lambda path: (scratch.is_relative_to(path), len(path.parts)))
    for index, folder in enumerate(ordered):
        is_inside = any(folder.is_relative_to(other) for other in opened)
        has_mounts = any(point.is_relative_to(folder) and point != folder for point in points)
        if is_inside or has_mounts or len(folder.parts) == 1 or not folder.is_dir() or set(str(folder)) & set(":,\\"):
            continue
        upper, work = scratch / f"upper{index}", scratch / f"overlay{index}"
        upper.mkdir()
        work.mkdir()
        settings = f"lowerdir={folder},upperdir={upper},workdir={work},userxattr"
        with suppress(OSError):
            _mount("overlay", str(folder), "overlay", _MS_NOSUID | _MS_NODEV, settings)
            opened.append(folder)
    return opened


def link_entries(folder: Path, work: Path) -> None:
    """Links the entries of a folder into another folder."""
    for entry in folder.iterdir():
        (work / entry.name).symlink_to(entry)


def drop_rights() -> None:
    """Permanently drops all capabilities, and blocks system calls that reach beyond the namespaces."""
    _prctl(_NO_NEW_PRIVS, 1)
    with suppress(OSError):  # fails after the kernel's last capability
        for capability in range(64):
            _prctl(_CAPBSET_DROP, capability)
    _prctl(_CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0))
    _call("capset", _libc.capset(header, ctypes.create_string_buffer(24)))
    instructions = filter_of_calls(platform.machine())
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in instructions))
    head = struct.pack("@HP", len(instructions), ctypes.addressof(program))
    _prctl(_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(head))


def filter_of_calls(machine: str) -> list[tuple[int, int, int, int]]:
    """Returns the instructions of a system-call filter: (code, jump if true, jump if false, value).

    The filter refuses sockets outside :data:`_OWN_FAMILIES`, socket pairs that can send to other sockets, the kernel's
    keys, ``io_uring``, which can create sockets, and calls from other tables.

    Raises:
        OSError: the system-call numbers of this machine are unknown.
    """
    if machine not in _CALLS:
        raise OSError(f"system calls of {machine} are unknown")
    architecture, socket, socketpair, keys = _CALLS[machine]
    load, equal, at_least, both, end = 0x20, 0x15, 0x35, 0x54, 0x06
    refuse, allow = (end, 0, 0, 0x00050000 | 13), (end, 0, 0, 0x7FFF0000)  # EACCES

    def only(offset: int, mask: int, values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
        """Allows an argument whose masked value is one of the values."""
        tests = [(equal, len(values) - index, 0, value) for index, value in enumerate(values)]
        return [(load, 0, 0, offset), (both, 0, 0, mask), *tests, refuse, allow]

    def if_called(number: int, then: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
        return [(equal, 0, len(then), number), *then]

    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), refuse, (load, 0, 0, 0), (at_least, 0, 1, _OTHER_TABLES)]
    program.append(refuse)
    for number in (_IO_URING_SETUP, *keys):
        program += if_called(number, [refuse])
    program += if_called(socket, only(16, 0xFFFFFFFF, _OWN_FAMILIES))
    program += if_called(socketpair, only(24, 0xF, (1,)))  # a stream can't be sent to another address
    return [*program, allow]


def run_as_first_process(command: list[str], work: Path, record_fd: int) -> None:
    """Runs the command as a child of this process, the first of its namespace, and exits soon after it."""
    try:
        _prctl(_PDEATHSIG, signal.SIGKILL)
        _mount("proc", "/proc", "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        os.chdir(work)
        drop_rights()
    except OSError as error:
        _write(record_fd, _told(error))
        os._exit(NOT_ISOLATED)
    child = os.fork()
    if child == 0:
        os.execv(command[0], command)  # noqa: S606
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))  # the kernel then ends the rest
    with suppress(ChildProcessError):  # none is left
        while True:
            if os.wait()[0] == child:
                signal.alarm(GRACE_S)
    os._exit(0)


def read_record(path: Path) -> bytes:
    """Returns the record if it is a regular file: the command may write anything, and this process has more rights."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        return file.read(_MAX_RECORD_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def _told(error: OSError) -> bytes:
    return json.dumps({"error": str(error).partition("] ")[2] or str(error)}).encode()


def _write(descriptor: int, text: bytes) -> None:
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(text)


def main() -> None:
    """Runs the command, exits after it and writes its record; SIGTERM ends the command."""
    scratch, record_fd, command = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(record_fd, False)
    try:
        enter_namespaces()
        work = close_files(scratch)
    except OSError as error:
        _write(record_fd, _told(error))
        sys.exit(NOT_ISOLATED)
    child = os.fork()
    if child == 0:
        run_as_first_process(command, work, record_fd)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != NOT_ISOLATED:
        _write(record_fd, read_record(scratch / RECORD))


if __name__ == "__main__":
    main()
