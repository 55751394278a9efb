#!/bin/sh
# Unpacks the tests' Transformer Engine into VENV/te: setup_te.sh VENV, an environment with pip.
# Its wheel is pure Python. It lies outside site-packages, because Megatron's import fails where it finds the package
# without its compiled extension. Of that extension only the source distribution is kept, for its list of functions.
# The folder is complete or is not there; it is made anew when requirements-te.txt has changed.
set -eu
venv=$(CDPATH= cd -- "$1" && pwd)
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
wanted=$root/requirements-te.txt

cmp -s "$wanted" "$venv/te/requirements-te.txt" && exit 0
new=$venv/te.new
rm -rf "$new"
mkdir "$new"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install --no-deps --target "$new" --requirement "$wanted"
version=$(sed -n 's/^transformer-engine==//p' "$wanted")
# The extension has no wheel, and pip asks the build of a source distribution for its name and version. That build looks
# for CUDA; this one takes its place, and answers.
backend=$new/backend/setuptools
mkdir -p "$backend"
: >"$backend/__init__.py"
cat >"$backend/build_meta.py" <<BACKEND
from pathlib import Path


class __legacy__:
    def prepare_metadata_for_build_wheel(directory, config_settings=None):
        folder = Path(directory, "transformer_engine_torch-$version.dist-info")
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer_engine_torch\nVersion: $version\n")
        return folder.name
BACKEND
(
    export PYTHONPATH="$new/backend"
    pip download --no-deps --no-build-isolation --no-binary transformer-engine-torch --dest "$new/sdist" \
        "transformer-engine-torch==$version"
)
rm -rf "$new/backend"
cp "$wanted" "$new/"
rm -rf "$venv/te"
mv "$new" "$venv/te"
