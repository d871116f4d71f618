#!/bin/bash
# tools.sh MODULE: builds the tools and programs of hack/MODULE once per version, and prints the directory
# that has them.
set -euo pipefail
module=$1
cd "$(dirname "$0")/$module"
sum=$(find . -type f | sort | xargs cat | sha256sum | cut -c1-16)
dir=${CTRLMESH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ctrlmesh}/$module-$sum
if [ ! -d "$dir" ]; then
  echo "building $module" >&2
  new=$dir.new.$$; trap 'rm -rf "$new"' EXIT
  mkdir -p "$new"
  # Prometheus finds targets in files and by Kubernetes alone: this leaves out the clients of all clouds.
  GOWORK=off GOFLAGS="-buildvcs=false -trimpath" CGO_ENABLED=0 ../progress.sh "building $module" ../retry.sh \
    go build -tags remove_all_sd,enable_kubernetes_sd -o "$new/" $(! grep -q ^tool go.mod || echo tool) ./...
  mv -T "$new" "$dir" 2>/dev/null || [ -d "$dir" ]
fi
echo "$dir"
