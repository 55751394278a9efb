"""Copies of the package without some features: deleted.py FOLDER DATA CASE..., where FOLDER/CASE has each copy.

Megatron, and what else the package imports, is imported once. Then a forked process imports every module of a copy, and
forks two ranks, which train a plain chunked step. Prints a line of JSON for each copy.
"""

import faulthandler
import importlib
import json
import os
import pkgutil
import secrets
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

NUM_RANKS = 2
LIMIT_S = 60
"""Of the ranks of a copy, on a machine that is several times slower."""
STEP = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--num-experts 4 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --transformer-impl local "
    "--disable-bias-linear --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 --train-iters 1 --eval-iters 0 "
    "--eval-interval 1000 --split 9,1,0 --tokenizer-type NullTokenizer --vocab-size 500 --num-workers 0 "
    "--lancet-num-chunks 2"
).split()


def import_all(copy: Path) -> str:
    """Imports every module of a copy; returns the names of the modules of other packages that it imports."""
    sys.path.insert(0, str(copy))
    package = importlib.import_module("megatron_lancet")
    assert package.__file__ == str(copy / "megatron_lancet/__init__.py")
    for module in pkgutil.walk_packages(package.__path__, "megatron_lancet."):
        importlib.import_module(module.name)
    return "\n".join(name for name in sys.modules if name.partition(".")[0] != "megatron_lancet")


def forked(work: Callable[[], str]) -> str:
    """Returns what a forked process finds; its traceback if it fails."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = work()
        except BaseException:  # noqa: BLE001 -- the parent prints it
            found = traceback.format_exc()
        with os.fdopen(write, "w") as out:
            out.write(found)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as out:
        found = out.read()
    os.waitpid(pid, 0)
    return found


def held_port() -> socket.socket:
    """A socket that holds a port below those that the kernel gives to connections, as tests.ranks.launch does."""
    while True:
        holder = socket.socket()
        with suppress(OSError):
            holder.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return holder
        holder.close()


def train(copy: Path, rank: int, port: int, data: str) -> None:
    """As a rank: trains a step with a copy, and ends the process."""
    status = 1
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    log = os.open(copy / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a rank that hangs says where
    sys.argv = ["pretrain_gpt_moe.py", *STEP, "--data-path", data]
    try:
        importlib.import_module("megatron_lancet.training.pretrain").main()
        status = 0
    except SystemExit as ended:
        status = 0 if ended.code in (None, 0) else 1
    except (Exception, KeyboardInterrupt):  # noqa: BLE001 -- the parent prints it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def flaw_of(copy: Path, data: str) -> str:
    """Imports a copy and runs its ranks; returns their output, empty if all went well."""
    import_all(copy)
    pids = []
    with held_port() as holder:
        for rank in range(NUM_RANKS):
            pids.append(os.fork())
            if pids[-1] == 0:
                train(copy, rank, holder.getsockname()[1], data)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    outputs = [(copy / f"rank{rank}.log").read_text() for rank in range(NUM_RANKS)]
    if any(statuses) or "(chunks=2 dim=batch" not in outputs[0]:
        return f"statuses {statuses}\n" + "\n".join(output[-3000:] for output in outputs)
    return ""


def main() -> None:
    import megatron.training  # noqa: F401

    folder, data, *cases = sys.argv[1:]
    copies = [Path(folder) / case for case in cases]
    for name in forked(partial(import_all, copies[0])).split("\n"):
        with suppress(ImportError):  # a module that another one has put there
            importlib.import_module(name or "sys")
    for copy in copies:
        found = {"case": copy.name, "error": forked(partial(flaw_of, copy, data))}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
