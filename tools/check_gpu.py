"""What to run first on a machine with a GPU: ten minutes, no network, no installation, and each result saved at once.

    python3 tools/check_gpu.py --carry wheels      # where there is a network: fetches what the GPU machine may lack
    python3 tools/check_gpu.py results             # on the GPU machine, in a copy of this folder with wheels in it
    python3 tools/check_gpu.py results --rehearse  # anywhere: the same lines on the virtual GPU, with small models

The GPU machine needs Python 3.12 or newer and torch 2.11 or newer. Everything else comes from the folder of wheels,
without a change to that machine's Python. The results are NAME.jsonl and NAME.log for each part, gpu-check.json, and
gpu-check.md, which has all of it on one page. docs/gpus.md describes the parts.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[1]
WHEELS = _REPOSITORY / "wheels"
NEEDED = {
    "megatron.core": "megatron-core",
    "numpy": "numpy",
    "packaging": "packaging",
    "psutil": "psutil",
    "sentencepiece": "sentencepiece",
    "tqdm": "tqdm",
}
"""Packages next to torch by the module that shows whether one is there."""
_ORIGIN = "origin.json"


class _UsageError(Exception):
    """As ``megatron_lancet.errors.UsageError``, which can't be imported before the packages are there."""


def carry(folder: Path) -> None:
    """Fetches the wheels of :data:`NEEDED` and of pip, in the pinned versions, for the Python that runs.

    Raises:
        _UsageError: the versions are not known here, or pip can't fetch them.
    """
    pinned = _pinned()
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory(dir=folder) as fetched:  # a failed download keeps the wheels of an earlier one
        done = subprocess.run([*command, "--dest", fetched, *pinned, "pip"], check=False)
        if done.returncode != 0:
            problem = f"pip ended with status {done.returncode}"
            raise _UsageError(f"{problem}: expected wheels of {', '.join(NEEDED.values())}.")
        for old in folder.glob("*.whl"):
            old.unlink()
        for wheel in Path(fetched).glob("*.whl"):
            shutil.move(wheel, folder)
    (folder / _ORIGIN).write_text(json.dumps({"commit": _commit()}) + "\n")
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {size / 1e6:.0f} MB")


def _pinned() -> list[str]:
    path = _REPOSITORY / "constraints.txt"
    if not path.exists():
        raise _UsageError(f"this needs a checkout of the project: {path.name} is not in the installed package.")
    lines = path.read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    return [f"{name}=={pins[name]}" for name in NEEDED.values()]


def _commit() -> str | None:
    """The commit that is checked out; None with changes, or where git or the repository is missing."""
    git = ["git", "-C", str(_REPOSITORY)]
    try:
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        )
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if changed.stdout.strip() else head.stdout.strip()


def make_importable(site: Path, wheels: Path) -> str | None:
    """Makes the packages importable for this process and its children: what is missing is unpacked from the wheels.

    Args:
        site: folder for the packages.

    Returns:
        The commit that was fetched for; None where it is unknown.

    Raises:
        _UsageError: torch is missing, or a package is neither there nor in ``wheels``.
    """
    if importlib.util.find_spec("torch") is None:
        raise _UsageError(f"{sys.executable} has no torch. Run this by the Python that has it, for a GPU.")
    missing = [name for module, name in NEEDED.items() if not _is_there(module)]
    if missing:
        _unpack(missing, site, wheels)
    places = [*([str(site)] if missing else []), str(_REPOSITORY)]
    sys.path[:0] = places
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
    origin = wheels / _ORIGIN
    return json.loads(origin.read_text())["commit"] if origin.exists() else None


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that the module is in
        return False


def _unpack(names: Sequence[str], site: Path, wheels: Path) -> None:
    pip = next(iter(sorted(wheels.glob("pip-*.whl"))), None)
    if pip is None:
        raise _UsageError(
            f"{sys.executable} lacks {', '.join(names)}, and {wheels} has no wheels. On a machine with a network and "
            f"the same Python, run: python3 tools/check_gpu.py --carry {wheels.name}; then copy this folder again."
        )
    shutil.rmtree(site, ignore_errors=True)
    # pip runs from its own wheel: not every Python has it.
    command = [sys.executable, str(pip / "pip"), "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--find-links", str(wheels), "--target", str(site), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise _UsageError(
            f"the wheels in {wheels} don't fit {sys.executable}: {done.stderr.strip().splitlines()[-1]}. Fetch them "
            "by the same version of Python: python3 tools/check_gpu.py --carry wheels."
        )


def _run(args: argparse.Namespace) -> bool:
    folder = args.folder.resolve()
    commit = make_importable(folder / "site", args.wheels.resolve())
    try:
        import benchmarks.gpu.check as check
    except ModuleNotFoundError:
        raise _UsageError(
            "this needs a checkout of the project: benchmarks/ is not in the installed package."
        ) from None
    from benchmarks.gpu.check.parts import PARTS
    from benchmarks.gpu.check.predict.file import DEVICES
    from megatron_lancet.training.platform.cuda_connections import CONNECTIONS, has_one_connection

    names = [part.name for part in PARTS]
    unknown = [name for name in args.parts or () if name not in names]
    if unknown:
        raise _UsageError(f"--parts {' '.join(unknown)}: expected some of {' '.join(names)}.")
    if args.device not in (None, *DEVICES):
        raise _UsageError(f"--device {args.device}: expected {' or '.join(DEVICES)}, whose steps are predicted.")
    if has_one_connection():
        raise _UsageError(f"{CONNECTIONS} is 1, with which messages would stop all other work. Unset it.")
    name = "" if args.rehearse else _require_device()
    device = args.device or next((one for one in DEVICES if one in name), "H100")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in PARTS if not args.parts or part.name in args.parts]
    return check.start(folder, args.rehearse, device, commit).run(chosen)


_DEVICES = "import torch; c = torch.cuda; n = c.device_count(); print(torch.__version__, n, n and c.get_device_name())"


def _require_device() -> str:
    """Name of the first device."""
    found = subprocess.run(
        [sys.executable, "-c", _DEVICES],
        capture_output=True,
        text=True,
        check=False,
    )
    version, count, name = [*found.stdout.strip().split(" ", 2), "", "", ""][:3]
    if found.returncode != 0 or not count.isdigit():
        raise _UsageError(f"torch can't be imported: {found.stderr.strip().splitlines()[-1:]}")
    if int(count) == 0:
        raise _UsageError(
            f"this runs on a CUDA device, and torch {version} finds none. Pass --rehearse to run the same lines on "
            "the virtual GPU."
        )
    return name


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, nargs="?", help="folder for the results")
    made.add_argument("--carry", type=Path, metavar="FOLDER", help="fetch wheels into this folder, and end")
    made.add_argument("--wheels", type=Path, default=WHEELS, metavar="FOLDER", help="what --carry fetched (wheels)")
    made.add_argument("--rehearse", action="store_true", help="on the virtual GPU, with small models and no times")
    made.add_argument("--parts", nargs="+", metavar="NAME", help="only these parts (all)")
    made.add_argument("--device", help="device of the prediction, H100 or H200 (default: the GPU found, else H100)")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all parts; the exit status is 1 if one of them failed, and 2 if the check can't begin."""
    args = parser().parse_args(argv)
    try:
        if args.carry is not None:
            carry(args.carry.resolve())
            return
        if args.folder is None:
            raise _UsageError("expected a folder for the results, for example: python3 tools/check_gpu.py results")
        is_good = _run(args)
    except _UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if not is_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
