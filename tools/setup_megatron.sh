#!/bin/sh
# Make an environment with another Megatron-Core in front of the packages of an environment:
# setup_megatron.sh ENVIRONMENT FOLDER VERSION.
set -eu
base=$1
folder=$2
version=$3

rm -rf "$folder"
"$base/bin/python" -m venv --without-pip "$folder"
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$base/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$packages/base.pth"
"$base/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps --target "$packages" "megatron-core==$version"
