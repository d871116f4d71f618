#!/bin/bash
# Builds the images of the tests' operators from .run/images/NAME: the binary alone, and for those
# in which tests run commands a shell beside it, for the probe clients too.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=../../hack/progress.sh
. hack/progress.sh
image() { progress "packing $1" tests/cluster/image.sh "localhost/ctrlmesh/$1:dev" ".run/images/$1.tar" -entrypoint "/$1" "${@:2}" ".run/images/$1=/$1" >/dev/null; }
image tally
image sloppy
image keeper
image reviewer
image candidate
image fleet
image gateway
applets=()
for a in $(busybox --list); do [ "$a" = busybox ] || applets+=("bin/$a@busybox"); done
shell=("$(command -v busybox)=/bin/busybox" "${applets[@]}")
image intruder bin/intruder@/intruder "${shell[@]}"
for client in curl openssl node; do clients+=(-with-libs "/usr/bin/$client"); done
[ ! -d /usr/share/nodejs ] || clients+=(/usr/share/nodejs=/usr/share/nodejs/)   # where Debian keeps parts of node
image probe -cmd wait "${clients[@]}" /etc/ssl/certs/ca-certificates.crt=/etc/ssl/certs/ca-certificates.crt .run/bin/gonet=/bin/gonet .run/bin/kubectl=/bin/kubectl bin/probe@/probe "${shell[@]}"
