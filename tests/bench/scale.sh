#!/bin/bash
# scale.sh [FLAGS]: what a manager takes in a large cluster, on a control plane of its own without nodes: ends
# the one that runs. FLAGS are those of tests/bench/scale.
set -euo pipefail
cd "$(dirname "$0")/../.."
export KUBECONFIG=$PWD/.run/kubeconfig PATH=$PWD/.run/bin:$PATH
# shellcheck source=../../hack/progress.sh
. hack/progress.sh
mkdir -p .run/scale
progress "building" env CGO_ENABLED=0 go build -o .run/scale/ ./tests/bench/scale ./cmd/ctrlmesh-manager
tests/cluster/down.sh
trap 'tests/cluster/down.sh' EXIT
trap 'exit 130' INT TERM
AUDIT=off tests/cluster/up.sh 0
# The nodes have no kubelets, so that nobody may evict their pods.
for unit in kube-controller-manager kube-scheduler; do tests/cluster/node.sh stop $unit; done
tests/cluster/node.sh exec netns ip route add local 198.18.0.0/15 dev lo
api=$(kubectl get endpointslice kubernetes -o 'jsonpath={.endpoints[0].addresses[0]}:{.ports[0].port}')

kubectl apply -k deploy/default >/dev/null
# The manager admits 50 pods a second of one apiserver. Those of this test are created as if admitted.
kubectl patch mutatingwebhookconfiguration ctrlmesh --type=json -p '[{"op": "remove", "path": "/webhooks/0"}]' >/dev/null
kubectl -n ctrlmesh-system apply -f - >/dev/null <<EOF
# The apiserver reaches the webhooks by endpoints, which nobody else writes here.
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: ctrlmesh-webhook, namespace: ctrlmesh-system, labels: {kubernetes.io/service-name: ctrlmesh-webhook}}
addressType: IPv4
ports: [{name: webhook, port: 9443, protocol: TCP}]
endpoints: [{addresses: [198.18.0.1], conditions: {ready: true}}]
EOF
token=$(kubectl -n ctrlmesh-system create token ctrlmesh-manager --duration=4h)
manager=$PWD/.run/scale/manager.kubeconfig
(umask 077 && kubectl config view --raw --minify >"$manager")
kubectl --kubeconfig "$manager" config set-cluster "$(kubectl --kubeconfig "$manager" config view -o 'jsonpath={.clusters[0].name}')" --server="https://$api" >/dev/null
kubectl --kubeconfig "$manager" config set-credentials manager --token="$token" >/dev/null
kubectl --kubeconfig "$manager" config set-context --current --user=manager >/dev/null
tests/cluster/node.sh exec netns .run/scale/scale -api "$api" -manager .run/scale/ctrlmesh-manager -manager-kubeconfig "$manager" -logs .run/scale "$@"
