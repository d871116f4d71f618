#!/bin/bash
# up.sh [N]: a Kubernetes cluster of N nodes (default 2; 0: the control plane alone). See README.md.
# shellcheck source=lib.sh
. "$(dirname "$(readlink -f "$0")")/lib.sh"
need_root
n=${1:-2}
[[ $n =~ ^[0-$MAX_NODES]$ ]] || die "0 to $MAX_NODES nodes, not $n"
use_family "${FAMILY:-}"

mkdir -p "$RUN"
exec 9>"$RUN/lock"
flock -n 9 || die "another up.sh or down.sh of this checkout is running"
! alive || die "the cluster of this checkout is up, or half up: down.sh ends it"
stop_all   # what a reboot may have left
rm -rf "$RUN"/{logs,node*} "$RUN"/audit*.log
trap '[ $? = 0 ] || echo "up.sh: failed; logs are in $RUN/logs; down.sh clears up" >&2' EXIT
trap 'exit 130' INT TERM
# From here on this script is a unit too, so that down.sh ends it with everything that it started.
mkdir -p "$UNITS/up"; echo $$ >"$UNITS/up/cgroup.procs"
"$HERE/build.sh"
echo "${FAMILY:-ipv4}" >"$RUN/family"
# A node takes some 17 inotify instances, and many machines allow a user 128 in all.
instances=/proc/sys/fs/inotify/max_user_instances
[ "$(<$instances)" -ge 1024 ] || echo 1024 >$instances || echo "up.sh: cannot raise $instances" >&2

start=$(date +%s%N)
say() { local ms=$((($(date +%s%N) - start) / 1000000)); printf '[%3d.%d s] %s\n' $((ms / 1000)) $((ms % 1000 / 100)) "$*"; }

# The network of the machine, in which the tests look for changes. A machine without IPv6 has no -6.
# shellcheck disable=SC2086
for what in address "route show table all" "-6 route show table all" rule; do ip $what || true; done >"$RUN/machine-network"
start_netns
for i in $(seq $MAX_NODES); do certs="${certs-} node$i=$(addresses node "$i" | comma)"; done
# shellcheck disable=SC2086
pki "$RUN/pki" "$API" "https://127.0.0.1:$(<"$RUN/port")" \
  "$({ addresses control-plane; addresses second-apiserver; addresses first-service; for m in $MEMBERS; do addresses member "$m"; done; } | comma)" $certs
install -m 600 "$RUN/pki/admin.kubeconfig" "$RUN/kubeconfig"
start_component etcd
start_component kube-apiserver
nodes=$(seq -f node%g "$n")
for node in $nodes; do start_node "$node"; done   # their runtimes start meanwhile
api_ready() { [ "$(kubectl get --raw=/readyz --request-timeout=2s)" = ok ]; }
waitfor 270 api_ready || { tail -n 5 "$RUN/logs/kube-apiserver.log" >&2; false; }
touch "$RUN/api-ready"
say "apiserver ready at https://127.0.0.1:$(<"$RUN/port")"
start_component kube-controller-manager
start_component kube-scheduler
[ -z "$nodes" ] || sed "s/CLUSTER_DNS/$(primary dns)/" "$HERE/manifests/coredns.yaml" | kubectl apply -f - >/dev/null

# The address ranges are fixed per node (routes, CNI); Node objects carry them too.
for node in $nodes; do
  cidrs=$(addresses node-pods "$node" | sed 's/.*/"&"/' | comma)
  waitfor 180 kubectl patch node "$node" -p "{\"spec\":{\"podCIDR\":${cidrs%%,*},\"podCIDRs\":[$cidrs]}}" ||
    { tail -n 5 "$RUN/logs/$node.log" "$RUN/$node/logs"/*.log >&2; false; }
done
waitfor 180 kubectl -n default get serviceaccount default   # without it no pod is admitted
if [ -n "$nodes" ]; then
  # Waits are short and repeated: a killed up.sh must not leave one behind for long.
  waitfor 270 kubectl wait --for=condition=Ready node --all --timeout=2s
  say "nodes ready: ${nodes//$'\n'/ }"
  waitfor 180 kubectl -n kube-system wait --for=condition=Available deploy/coredns --timeout=2s
  say "DNS ready"
fi
echo "export KUBECONFIG=$RUN/kubeconfig PATH=$RUN/bin:\$PATH"
