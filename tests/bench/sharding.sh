#!/bin/bash
# sharding.sh [FLAGS]: what shards cost and what they gain, on a cluster of its own: ends the one
# that runs. FLAGS are those of tests/bench/sharding.
set -euo pipefail
cd "$(dirname "$0")/../.."
export KUBECONFIG=$PWD/.run/kubeconfig PATH=$PWD/.run/bin:$PATH
dir=$(mktemp -d)
CGO_ENABLED=0 go build -o .run/bench ./tests/bench
CGO_ENABLED=0 go build -o .run/sharding ./tests/bench/sharding
tests/cluster/down.sh
trap 'rm -rf "$dir"; tests/cluster/down.sh' EXIT
trap 'exit 130' INT TERM
AUDIT=off tests/cluster/up.sh 2
make -s test-images
missed=0

kubectl create namespace bench >/dev/null
kubectl -n bench create serviceaccount bench >/dev/null
kubectl create clusterrole bench --verb=list,create --resource=configmaps >/dev/null
kubectl create clusterrolebinding bench --clusterrole=bench --serviceaccount=bench:bench >/dev/null
for i in {0..4}; do kubectl create namespace "filtered-$i" >/dev/null; done
kubectl config view --raw --minify -o 'jsonpath={.clusters[0].cluster.certificate-authority-data}' | base64 -d >"$dir/ca.crt"
api=$(kubectl get endpointslice kubernetes -o 'jsonpath={.endpoints[0].addresses[0]}:{.ports[0].port}')
kubectl -n bench create token bench --duration=1h |
  tests/cluster/node.sh exec netns .run/bench filter -api "$api" -ca "$dir/ca.crt" -namespace bench || missed=1
for i in {0..4}; do kubectl delete namespace "filtered-$i" >/dev/null; done   # else they weigh in what follows

hack/install.sh >/dev/null
kubectl apply -k deploy/default >/dev/null   # without an access line per request
kubectl -n ctrlmesh-system rollout status daemonset/ctrlmesh-agent --timeout=120s >/dev/null
.run/sharding "$@" || missed=1
exit $missed
