#!/bin/bash
# agent.sh NAMESPACE: the memory of an agent with ten captured pods, each with an
# informer of the objects that `bench run` left in NAMESPACE. Installs the mesh. Fails if it is over the limit.
set -euo pipefail
cd "$(dirname "$0")/../.."
namespace=$1 log=$(mktemp) mostMemory=40
trap 'rm -f "$log"' EXIT
skip() { echo "| agent with 10 captured pods | skipped: $* | |"; exit 0; }

printf '\n| row | RSS | limit |\n|---|---|---|\n'
make -s images install >"$log" 2>&1 || { tail -n 5 "$log" >&2; skip "the mesh could not be installed"; }
tests/cluster/image.sh localhost/ctrlmesh/bench:dev .run/bench.tar -entrypoint /bench .run/bench=/bench >/dev/null
tests/cluster/node.sh load node1 .run/bench.tar
# The last: another may be terminating.
agent=$(kubectl -n ctrlmesh-system get pod -l app.kubernetes.io/name=ctrlmesh-agent --field-selector spec.nodeName=node1 \
  --sort-by=.metadata.creationTimestamp -o name | tail -n 1)
metric() { # metric NAME: of the agent, labels as a part of the name
  kubectl get --raw "/api/v1/namespaces/ctrlmesh-system/pods/${agent#pod/}:9090/proxy/metrics" | awk -v name="$1" '$1 == name {printf "%d", $2}'
}
megabytes() { echo $(($(metric process_resident_memory_bytes) / 1000000)); }
synced() { kubectl -n "$namespace" logs -l app=informers --tail=1 --prefix 2>/dev/null | grep -c 'synced$' || true; }

before=$(megabytes) most=0 end=$((SECONDS + 60))
kubectl -n "$namespace" apply -f tests/bench/agent.yaml >"$log"
until [ "$(synced)" = 10 ]; do
  [ $SECONDS -lt $end ] || skip "only $(synced) of 10 informers synced within a minute"
  now=$(megabytes); ((now <= most)) || most=$now
done
for _ in {1..10}; do
  now=$(megabytes); ((now <= most)) || most=$now
  sleep 1
done
captured=$(($(metric 'ctrlmesh_captured_pods{mode="ebpf"}') + $(metric 'ctrlmesh_captured_pods{mode="iptables"}')))
verdict=ok
((now <= mostMemory)) || verdict=MISSED
echo "| agent with $captured captured pods, each with an informer of 5,000 ConfigMaps | $now MB; at most $most MB while they listed; $before MB before | <= $mostMemory MB $verdict |"
[ $verdict = ok ]
