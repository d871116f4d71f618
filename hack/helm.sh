#!/bin/bash
# Builds helm and the renderer of the chart once per version, and prints the directory that has them.
set -euo pipefail
cd "$(dirname "$0")/helm"
sum=$(cat go.mod go.sum main.go | sha256sum | cut -c1-16)
dir=${CTRLMESH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ctrlmesh}/helm-$sum
if [ ! -d "$dir" ]; then
  echo "building helm" >&2
  new=$dir.new.$$; trap 'rm -rf "$new"' EXIT
  mkdir -p "$new"
  GOWORK=off GOFLAGS="-buildvcs=false -trimpath" CGO_ENABLED=0 ../progress.sh "building helm" ../retry.sh go build -o "$new/" helm.sh/helm/v3/cmd/helm
  GOWORK=off GOFLAGS="-buildvcs=false -trimpath" CGO_ENABLED=0 ../progress.sh "building the renderer" ../retry.sh go build -o "$new/render" .
  mv -T "$new" "$dir" 2>/dev/null || [ -d "$dir" ]
fi
echo "$dir"
