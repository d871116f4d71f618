#!/bin/bash
# image.sh NAME:TAG OUT.tar [OPTION]... SOURCE...: an image from files of this machine; no registry, no Docker.
#   SOURCE    FILE=DEST   DIR=DEST/ (with all below)   LINK@TARGET (a symbolic link)
#   OPTION    -entrypoint A,B   -cmd A,B   -env K=V,K=V   -user U   -with-libs PATH (a program, or a directory of
#             them, at its own place with the shared libraries it needs; may be repeated)
# shellcheck source=lib.sh
. "$(dirname "$(readlink -f "$0")")/lib.sh"
[ $# -gt 2 ] || { sed -n '2,/^# shell/s/^# //p' "$0" | sed '$d' >&2; exit 2; }
tools=$("$ROOT/hack/tools.sh" release)
ref=$1 out=$2; shift 2
exec "$tools/packimage" -ref "$ref" -o "$out" "$@"
