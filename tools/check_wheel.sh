#!/bin/sh
# Builds the source distribution and from it the wheel, checks what is in them, installs the wheel into an empty
# environment and runs it there, away from this checkout: check_wheel.sh [PYTHON]. PYTHON has setuptools (default:
# .venv/bin/python). About two minutes where pip has torch in its cache; all files are temporary.
set -eu
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
python=${1:-$root/.venv/bin/python}
case $python in # not relative: it is used from other folders
    */*) python=$(CDPATH= cd -- "$(dirname -- "$python")" && pwd)/${python##*/} ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP
unset PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1

step() { echo "wheel: $*"; }

step "building"
mkdir "$work/source" "$work/dist" "$work/elsewhere"
# From a copy without what lies around in a checkout: an old egg-info adds files to a source distribution.
tar -C "$root" --exclude=./.git --exclude=./.venv --exclude='./.venv-torch-*' --exclude=./runs --exclude=./build --exclude='*.egg-info' \
    --exclude=__pycache__ --exclude='.*_cache' -cf - . | tar -C "$work/source" -xf -
(cd "$work/source" && "$python" -c '
import sys
from setuptools import build_meta
build_meta.build_sdist(sys.argv[1])
' "$work/dist") >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/dist" "$work"/dist/*.tar.gz

step "contents"
"$python" - "$work" <<'CHECK'
import sys
import tarfile
import zipfile
from pathlib import Path

work = Path(sys.argv[1])
source = work / "source"
(wheel,), (sdist,) = work.glob("dist/*.whl"), work.glob("dist/*.tar.gz")


def files(*folders: str) -> set[str]:
    return {str(f.relative_to(source)) for folder in folders for f in (source / folder).rglob("*") if f.is_file()}


with zipfile.ZipFile(wheel) as archive:
    names = set(archive.namelist())
    metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
expected = files("megatron_lancet")
expected |= {f"megatron_lancet/{name}" for name in files("tools") if name.endswith(".py")}
packaged = {name for name in names if ".dist-info/" not in name}
assert packaged == expected, f"wheel: missing {sorted(expected - packaged)}, unexpected {sorted(packaged - expected)}"
assert any(name.endswith("/licenses/LICENSE") for name in names), "wheel: no LICENSE"

with tarfile.open(sdist) as archive:
    shipped = {name.partition("/")[2] for name in archive.getnames()}
expected = files("megatron_lancet", "tools", "tests", "docs", "examples", "benchmarks")
expected |= {"setup.py", "pyproject.toml", "constraints.txt", "requirements-te.txt", "Makefile", "LICENSE"}
expected |= {"README.md", "CHANGELOG.md"}
assert expected <= shipped, f"source distribution: missing {sorted(expected - shipped)}"

version = wheel.name.split("-")[1]
assert f"\nVersion: {version}\n" in metadata
(work / "version").write_text(version)
print(f"       {wheel.name}: {len(packaged)} files, {wheel.stat().st_size / 1e3:.0f} KB; {sdist.name}: {len(shipped)}")
CHECK

step "installing into an empty environment"
"$python" -m venv "$work/venv"
# Without compiling: most of torch is never imported here.
"$work/venv/bin/python" -m pip install --quiet --no-compile --constraint "$root/constraints.txt" "$work"/dist/*.whl
PATH=$work/venv/bin:$PATH
export PATH XDG_CACHE_HOME="$work/cache" # from here on: pip has its own there
cd "$work/elsewhere"

# Output of a command; all of it, if the command fails.
quietly() { "$@" >out.txt 2>&1 || { status=$?; cat out.txt >&2; echo "error: status $status: $*" >&2; exit 1; }; }
shows() { grep -q -- "$1" out.txt || { cat out.txt >&2; echo "error: '$1' is not in this output" >&2; exit 1; }; }

step "scripts and their help"
quietly pretrain-gpt-moe --version
shows "megatron-lancet $(cat "$work/version")"
quietly pretrain-gpt-moe --help
shows --lancet-plan
quietly lancet --help
commands=$(python -c 'from megatron_lancet.cli.commands import COMMANDS; print("\n".join(COMMANDS))')
echo "$commands" | while read -r command; do
    # shellcheck disable=SC2086 # words
    quietly lancet $command --help
    shows "usage: lancet $command"
done

step "training"
model="--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 100 --num-workers 0 --eval-iters 0 --eval-interval 1000"
# shellcheck disable=SC2086 # words
quietly torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 1 --no-python \
    pretrain-gpt-moe $model --train-iters 2 --log-interval 1
shows "iteration *2/ *2 "

step "profile, plan, explanation; a run by that plan and its timeline, in a mocked world of 2 ranks"
mocked="--distributed-backend mock --expert-model-parallel-size 2 --global-batch-size 4"
# shellcheck disable=SC2086
quietly env WORLD_SIZE=2 lancet plan profile --output profile.json $model $mocked
quietly lancet plan make profile.json --output plan.json
quietly lancet plan explain plan.json
# shellcheck disable=SC2086
quietly env WORLD_SIZE=2 RANK=0 pretrain-gpt-moe $model $mocked --train-iters 6 --lancet-plan plan.json --lancet-report report
shows "Megatron-Lancet report"
mkdir again
quietly lancet trace show report/trace.json --output again
grep -q "<script" again/timeline.html
step "all right"
