#!/bin/sh
# Make a virtual environment with the pinned packages: setup_venv.sh FOLDER [TORCH]. TORCH is a version in place of the
# pinned one, with the libraries that it asks for. PYTHON names an interpreter to use.
set -eu
venv=$1
torch=${2:-}
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)

is_new_enough() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

found=
for candidate in ${PYTHON:-python3.12 python3 python3.13 python3.14}; do
    if is_new_enough "$candidate"; then
        found=$candidate
        break
    fi
done
if [ -z "$found" ]; then
    echo "error: no Python >= 3.12 with venv found (tried: ${PYTHON:-python3.12 python3 python3.13 python3.14});" \
        "install it, for example: apt install python3.12-venv, pyenv install 3.12, or uv python install 3.12;" \
        "or name it: make PYTHON=/path/to/python3.12" >&2
    exit 1
fi

echo "setting up $venv with $("$found" --version); torch and its libraries are some gigabytes, once"
# An environment that works is brought up to date, one that does not (moved, interrupted) is made anew.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$found" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
constraints=$root/constraints.txt
compile=--compile
if [ -n "$torch" ]; then
    constraints=$venv/constraints.txt
    compile=--no-compile # the quick tests import a small part of all that
    # Each version of torch has its own bounds for these; it names nearly all of them exactly.
    own="torch|triton|setuptools|nvidia-[^=]*|cuda-[^=]*"
    echo "torch==$torch" >"$constraints"
    case $torch in
        2.11 | 2.11.*)
            # Its Triton, 3.6, interprets kernels with conversions of arrays that NumPy 2.4 refuses.
            own="$own|numpy"
            echo "numpy<2.4" >>"$constraints"
            ;;
    esac
    grep -Ev "^($own)==" "$root/constraints.txt" >>"$constraints"
fi
# setuptools first: the editable install below then needs no build environment of its own.
pip install "$compile" --constraint "$constraints" setuptools
pip install "$compile" --constraint "$constraints" --no-build-isolation --editable "$root[test]"
sh "$root/tools/setup_te.sh" "$venv"
