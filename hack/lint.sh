#!/bin/bash
# lint.sh [PACKAGE...]: golangci-lint, with gofmt and go vet in it, on the packages (default: all). It is built once per version.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=progress.sh
. hack/progress.sh
version=v2.15.0
bin=${CTRLMESH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ctrlmesh}/golangci-lint-$version
if [ ! -d "$bin" ]; then
  echo "building golangci-lint $version"
  new=$bin.new.$$; trap 'rm -rf "$new"' EXIT
  GOBIN=$new GOWORK=off progress "building golangci-lint" hack/retry.sh go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$version
  mv -T "$new" "$bin" || [ -d "$bin" ]
fi
echo "linting"
progress "linting" "$bin/golangci-lint" run "${@:-./...}"
