#!/bin/bash
# Builds the images from bin/ for this machine, as archives in the OCI image layout, into bin/images/: no registry and
# no Docker needed. Push them with any tool, or load them into containerd.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=../../hack/progress.sh
. hack/progress.sh
tools=$(hack/tools.sh release)
of=.run/platforms/$(go env GOARCH)
mkdir -p "$of"
ln -sfn "$PWD"/bin/ctrlmesh-{agent,manager} "$of/"
ln -sfn "$(progress "downloading the packages of Debian" hack/release/packages.sh "$(go env GOARCH)")" "$of/packages"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || echo 0); export SOURCE_DATE_EPOCH
progress "packing the images" "$tools/release" images -dir bin/images "$of" >/dev/null
