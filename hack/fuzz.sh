#!/bin/bash
# Runs each fuzz target of the tree for a while: FUZZTIME=20s hack/fuzz.sh
set -euo pipefail
cd "$(dirname "$0")/.."
grep -rlE '^func Fuzz' --include='*_test.go' . | while read -r file; do
  for target in $(sed -nE 's/^func (Fuzz[A-Za-z0-9_]+)\(.*/\1/p' "$file"); do
    echo "$target in $(dirname "$file")"
    go test "$(dirname "$file")" -run '^$' -fuzz "^$target\$" -fuzztime "${FUZZTIME:-20s}"
  done
done
