#!/bin/bash
# check.sh [BASE]: gofmt, go vet, the linter and the quick unit tests of the packages that changed since BASE
# (default: where this branch left origin/main, else the last commit). Needs neither root nor a cluster.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${1:-$(git merge-base HEAD origin/main 2>/dev/null || git rev-parse HEAD)}
files=$({ git diff --name-only --diff-filter=d "$base" -- '*.go'; git ls-files --others --exclude-standard -- '*.go'; } | sort -u)
[ -n "$files" ] || { echo "no Go file differs from $base"; exit 0; }
mapfile -t files <<<"$files"
unformatted=$(gofmt -l "${files[@]}")
[ -z "$unformatted" ] || { printf 'run gofmt -w on:\n%s\n' "$unformatted" >&2; exit 1; }
mapfile -t packages < <(go list -f '{{.Dir}}' $(dirname "${files[@]}" | sort -u | sed 's|^|./|') | sed "s|^$PWD|.|")
printf 'checking %s\n' "${packages[@]}"
hack/lint.sh "${packages[@]}"
mapfile -t tested < <(printf '%s\n' "${packages[@]}" | grep -v '/tests/e2e' || true)
[ ${#tested[@]} = 0 ] || go test -short "${tested[@]}"
