#!/bin/bash
# Removes the mesh from the cluster of tests/cluster, by the commands of the README.
set -euo pipefail
cd "$(dirname "$0")/.."
if kubectl get crd shardingconfigs.ctrlmesh.kusionstack.io >/dev/null 2>&1; then
  kubectl delete shardingconfigs -A --all --timeout=120s
fi
kubectl apply -k deploy/cleanup >/dev/null
kubectl -n ctrlmesh-system rollout status daemonset/ctrlmesh-agent --timeout=120s
kubectl delete -k deploy/default --ignore-not-found
kubectl delete configmaps -A -l ctrlmesh.kusionstack.io/bundle=true --ignore-not-found
