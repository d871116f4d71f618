#!/bin/bash
# captured.sh NAMESPACE [FLAGS]: measures requests from a pod on the mesh and from one off it, with the objects that
# `bench run` left in NAMESPACE. Installs the mesh.
set -euo pipefail
cd "$(dirname "$0")/../.."
namespace=$1 log=$(mktemp)
shift
trap 'rm -f "$log"' EXIT
make -s images install >"$log" 2>&1 || { tail -n 5 "$log" >&2; echo "skipped: the mesh could not be installed"; exit 0; }
kubectl apply -k deploy/default >"$log" # logs as users have them
kubectl -n ctrlmesh-system rollout status daemonset/ctrlmesh-agent --timeout=120s >"$log"
kubectl -n "$namespace" apply -f tests/bench/captured.yaml >"$log"
kubectl -n "$namespace" wait --for=condition=Ready pod/off pod/on --timeout=60s >"$log"
uid() { kubectl -n "$namespace" get pod "$1" -o 'jsonpath={.metadata.uid}'; }
# The last: another may be terminating.
agent=$(kubectl -n ctrlmesh-system get pod -l app.kubernetes.io/name=ctrlmesh-agent --field-selector spec.nodeName=node1 \
  --sort-by=.metadata.creationTimestamp -o 'jsonpath={.items[-1:].metadata.uid}')
.run/bench captured -namespace "$namespace" -off "$(uid off)" -on "$(uid on)" -agent "$agent" "$@"
