#!/bin/bash
# load.sh TAR...: loads images (see image.sh) into all running nodes at once.
# shellcheck source=lib.sh
. "$(dirname "$(readlink -f "$0")")/lib.sh"
[ $# -gt 0 ] || die "which images?"
nodes=$(running_nodes); [ -n "$nodes" ] || die "no node is running"
loads=()
for node in $nodes; do "$HERE/node.sh" load "$node" "$@" & loads+=($!); done
for l in "${loads[@]}"; do wait "$l"; done
