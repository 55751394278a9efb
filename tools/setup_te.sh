#!/bin/sh
# Unpacks the tests' Transformer Engine into VENV/te: setup_te.sh VENV, an environment with pip, setuptools and torch.
# Its wheel is pure Python. It lies outside site-packages, because Megatron's import fails where it finds the package
# without its compiled extension. Of that extension only the source distribution is kept, for its list of functions.
# The folder is complete or is not there; it is made anew when requirements-te.txt has changed.
set -eu
venv=$1
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
wanted=$root/requirements-te.txt

cmp -s "$wanted" "$venv/te/requirements-te.txt" && exit 0
new=$venv/te.new
rm -rf "$new"
mkdir "$new"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install --no-deps --target "$new" --requirement "$wanted"
# The extension has no wheel. Without build isolation pip asks the torch that is here and downloads no other.
version=$(sed -n 's/^transformer-engine==//p' "$wanted")
pip download --no-deps --no-build-isolation --no-binary transformer-engine-torch --dest "$new/sdist" \
    "transformer-engine-torch==$version"
cp "$wanted" "$new/"
rm -rf "$venv/te"
mv "$new" "$venv/te"
