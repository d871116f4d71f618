#!/bin/bash
# costs.sh: what capture costs, as root, without a cluster: a captured pod's connect() beside a plain one,
# the agent's processor time to capture a pod, and to check a full node. Fails if a limit is missed.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH=$PATH:/usr/sbin
out=$(mktemp)
trap 'rm -f "$out"' EXIT
bench() { go test -run '^$' "$@" >>"$out" 2>&1 || { cat "$out" >&2; exit 1; }; }
bench -bench '^BenchmarkConnect$' -benchtime 30x -count 5 ./bpf
bench -bench '^BenchmarkCapture$' -benchtime 20x -count 5 ./agent/capture
bench -bench '^BenchmarkCheck$' -benchtime 20x -count 3 ./agent/capture
go run ./tests/bench/costs <"$out"
