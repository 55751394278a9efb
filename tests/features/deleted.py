"""Copies of the package without one feature: deleted.py FOLDER DATA CASE..., where FOLDER/CASE has each copy.

Megatron, and what else the package imports, is imported once. Then each copy gets two forked ranks, which train a plain
chunked step; the first one imports every module of the copy before. Prints a line of JSON for each copy.
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
from contextlib import suppress
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


def import_all(copy: Path) -> None:
    """Imports every module of a copy."""
    sys.path.insert(0, str(copy))
    package = importlib.import_module("megatron_lancet")
    assert package.__file__ == str(copy / "megatron_lancet/__init__.py")
    for module in pkgutil.walk_packages(package.__path__, "megatron_lancet."):
        importlib.import_module(module.name)


def import_packages_of(copy: Path) -> None:
    """Imports the modules of other packages that a copy imports, as a forked process finds them."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException), os.fdopen(write, "w") as names:
            import_all(copy)
            names.write("\n".join(name for name in sys.modules if name.partition(".")[0] != "megatron_lancet"))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as names:
        found = names.read().split("\n")
    os.waitpid(pid, 0)
    for name in found:
        with suppress(ImportError):  # a module that another one has put there
            importlib.import_module(name or "sys")


def train(copy: Path, data: str) -> None:
    """As a rank: trains a step with a copy; the first rank imports all of it before."""
    if os.environ["RANK"] == "0":
        import_all(copy)
    sys.path.insert(0, str(copy))
    sys.argv = ["pretrain_gpt_moe.py", *STEP, "--data-path", data]
    importlib.import_module("megatron_lancet.training.pretrain").main()


def free_port() -> int:
    """A port on which nobody listens, below those that the kernel gives to connections."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def ranks_of(copy: Path, data: str) -> str:
    """Runs the ranks of a copy; returns their output, empty if all went well."""
    pids, port = [], free_port()
    for rank in range(NUM_RANKS):
        pid = os.fork()
        if pid == 0:
            status = 1
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            log = os.open(copy / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a rank that hangs says where
            try:
                train(copy, data)
                status = 0
            except SystemExit as ended:
                status = 0 if ended.code in (None, 0) else 1
            except (Exception, KeyboardInterrupt):  # noqa: BLE001 -- the parent prints it
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    outputs = [(copy / f"rank{rank}.log").read_text() for rank in range(NUM_RANKS)]
    if any(statuses) or "(chunks=2 dim=batch" not in outputs[0]:
        return f"statuses {statuses}\n" + "\n".join(output[-3000:] for output in outputs)
    return ""


def main() -> None:
    import megatron.training  # noqa: F401

    folder, data, *cases = sys.argv[1:]
    import_packages_of(Path(folder) / cases[0])
    for case in cases:
        found = {"case": case, "error": ranks_of(Path(folder) / case, data)}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
