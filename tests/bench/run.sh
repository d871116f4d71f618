#!/bin/bash
# run.sh [FLAGS]: measures against the cluster of this checkout, in the control
# plane's network namespace. FLAGS are those of `bench run`: -rows, -subjects, -rounds, ...
set -euo pipefail
cd "$(dirname "$0")/../.."
export KUBECONFIG=$PWD/.run/kubeconfig PATH=$PWD/.run/bin:$PATH:/usr/sbin
tests/setup.sh bench
CGO_ENABLED=0 go build -o .run/bench ./tests/bench

namespace=ctrlmesh-bench-$$
dir=$(mktemp -d)
trap 'rm -rf "$dir"; kubectl delete namespace "$namespace" --wait=false --ignore-not-found >/dev/null' EXIT
trap 'exit 130' INT TERM
kubectl create namespace "$namespace" >/dev/null
kubectl -n "$namespace" apply -f tests/bench/objects.yaml >/dev/null
kubectl config view --raw --minify -o 'jsonpath={.clusters[0].cluster.certificate-authority-data}' | base64 -d >"$dir/ca.crt"
api=$(kubectl get endpointslice kubernetes -o 'jsonpath={.endpoints[0].addresses[0]}:{.ports[0].port}')

missed=0
for command in run observe; do
  kubectl -n "$namespace" create token bench --duration=1h |
    tests/cluster/node.sh exec netns .run/bench $command -api "$api" -ca "$dir/ca.crt" -namespace "$namespace" "$@" || missed=1
done
.run/bench reviews "$@" || missed=1
tests/bench/captured.sh "$namespace" "$@" || missed=1
tests/bench/agent.sh "$namespace" || missed=1
exit $missed
