#!/bin/bash
# report.sh: what the stages in .run/stages came to. What failed comes last: the logs of the mesh if an
# end-to-end test failed, the seconds of each stage, and the failures.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/.run/bin:$PATH
export KUBECONFIG=$PWD/.run/kubeconfig
[ -f .run/stages/times ] || exit 0
failed=$(awk '$2 == "failed" {print $1}' .run/stages/times)

mesh_logs() {
  kubectl get --raw=/readyz --request-timeout=5s >/dev/null 2>&1 || { echo "the cluster does not answer"; return; }
  local mesh=(kubectl -n ctrlmesh-system --request-timeout=20s)
  echo "--- the managers' logs"
  "${mesh[@]}" logs -l app.kubernetes.io/name=ctrlmesh-manager --prefix --tail=15 || true
  echo "--- the agents' logs"
  "${mesh[@]}" logs -l app.kubernetes.io/name=ctrlmesh-agent --prefix --tail=15 || true
  echo "--- the latest Events that warn"
  kubectl --request-timeout=20s get events -A --field-selector type=Warning --sort-by=.lastTimestamp | tail -n 15 || true
}

case $failed in e2e*) mesh_logs 2>&1 | cut -c1-400 ;; esac
echo "--- seconds of each stage"
awk '{printf "%-16s %-7s %5d\n", $1, $2, $3; all += $3} END {printf "%-24s %5d\n", "all", all}' .run/stages/times
found=$([ ! -x .run/gotest ] || .run/gotest -summary)
[ -z "$found" ] || printf -- '--- tests\n%s\n' "$found"
case "$found" in
*FAIL*) ;;
*) [ -z "$failed" ] || { echo "--- the end of stage $failed"; tail -n 30 ".run/stages/$failed.log"; } ;;
esac
[ -z "$failed" ] || echo "FAILED: $failed"
