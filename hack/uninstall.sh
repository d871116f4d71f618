#!/bin/bash
# Removes the mesh from the cluster of tests/cluster, by the commands of docs/operations.md.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=progress.sh
. hack/progress.sh
if kubectl get crd shardingconfigs.ctrlmesh.kusionstack.io >/dev/null 2>&1; then
  progress "deleting the configurations" kubectl delete shardingconfigs.ctrlmesh.kusionstack.io -A --all --timeout=300s
fi
if kubectl get crd virtualapps.ctrlmesh.kruise.io >/dev/null 2>&1; then
  progress "deleting objects of the dialects" kubectl delete virtualapps,shardingconfigs.kridge.kusionstack.io -A --all --timeout=300s
fi
kubectl apply -k deploy/cleanup >/dev/null
progress "cleaning the nodes" kubectl -n ctrlmesh-system rollout status daemonset/ctrlmesh-agent --timeout=120s
hack/policies.sh delete --ignore-not-found
progress "deleting the mesh" kubectl delete -k deploy/default --ignore-not-found
kubectl delete configmaps -A -l ctrlmesh.kusionstack.io/bundle=true --ignore-not-found
kubectl delete configmaps -A -l ctrlmesh.kusionstack.io/usage=true --ignore-not-found
