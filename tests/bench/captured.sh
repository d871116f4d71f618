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
# process ARGUMENTS: of the container of the pod that kubectl gets by them; that of its sandbox has no credentials.
process() {
  local uid pid
  uid=$(kubectl get pod "$@" -o 'jsonpath={..metadata.uid}')
  for pid in $(grep -ls "$uid" /proc/[0-9]*/cgroup | cut -d/ -f3); do
    [ ! -e "/proc/$pid/root/var/run/secrets/kubernetes.io/serviceaccount/token" ] || { echo "$pid"; return; }
  done
  echo "captured.sh: no process of pod $*" >&2
  return 1
}
off=$(process -n "$namespace" off) on=$(process -n "$namespace" on)
agent=$(process -n ctrlmesh-system -l app.kubernetes.io/name=ctrlmesh-agent --field-selector spec.nodeName=node1)
# Redirected is what processes below the node's control group do.
groups=/sys/fs/cgroup/unified
[ -d $groups ] || groups=/sys/fs/cgroup
(
  echo $BASHPID >"$groups$(sed -n 's/^0:://p' "/proc/$on/cgroup")/cgroup.procs"
  exec .run/bench captured -namespace "$namespace" -off "$off" -on "$on" -agent "$agent" "$@"
)
