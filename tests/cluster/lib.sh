# lib.sh: the settings and functions that the scripts of this directory share. Source it; it runs nothing.
# shellcheck shell=bash disable=SC2034
set -euo pipefail

HERE=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
RUN=$(readlink -f "$ROOT/.run" || echo "$ROOT/.run")   # all state, also of a checkout that links to another's; nothing is written elsewhere but into the cache
CACHE=${CTRLMESH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ctrlmesh}
. "$ROOT/hack/progress.sh"
PATH=$RUN/bin:$PATH:/usr/local/go/bin:/usr/sbin:/sbin
export HERE ROOT RUN PATH
export KUBECONFIG=$RUN/kubeconfig   # not yours: a script of this directory never talks to another cluster
export KUBECACHEDIR=$RUN/kube-cache

# Addresses inside the cluster. They exist only in its own network namespaces, so they are fixed:
# clusters of other checkouts on the same machine use the same ones and never meet.
MAX_NODES=9
MAX_MEMBERS=4
address() { # address 4|6 WHAT [NODE|MEMBER]: one address or network
  local n=${3-}; n=${n#node}; n=${n#member}
  case $1-$2 in
  4-control-plane) echo 10.99.0.1 ;;               6-control-plane) echo fd10:99::1 ;;
  4-second-apiserver) echo 10.99.0.2 ;;            6-second-apiserver) echo fd10:99::2 ;;
  4-member) echo "10.99.0.$((100 + n))" ;;         6-member) echo "fd10:99::$((100 + n))" ;;
  4-node) echo "10.99.0.$((10 + n))" ;;            6-node) echo "fd10:99::$((10 + n))" ;;
  4-node-pods) echo "10.244.$n.0/24" ;;            6-node-pods) echo "fd10:244:0:$n::/64" ;;
  4-pods) echo 10.244.0.0/16 ;;                    6-pods) echo fd10:244::/48 ;;
  4-services) echo 10.96.0.0/16 ;;                 6-services) echo fd10:96::/112 ;;
  4-first-service) echo 10.96.0.1 ;;               6-first-service) echo fd10:96::1 ;;
  4-dns) echo 10.96.0.10 ;;                        6-dns) echo fd10:96::a ;;
  4-any) echo 0.0.0.0/0 ;;                         6-any) echo ::/0 ;;
  4-length) echo 24 ;;                             6-length) echo 64 ;;   # of the bridge's network
  esac
}
addresses() { local v; for v in $IPS; do address "$v" "$@"; done; }                # of all families, the primary first
primary() { address "${IPS%% *}" "$@"; }
comma() { paste -sd, -; }
endpoint() { case $1 in *:*) echo "[$1]:$2" ;; *) echo "$1:$2" ;; esac; }        # endpoint ADDRESS PORT

# IPS is which families there are, the primary first. They are chosen by up.sh and hold until down.sh.
use_family() {
  case ${1:-ipv4} in ipv4) IPS=4 ;; dual) IPS="4 6" ;; dual6) IPS="6 4" ;; ipv6) IPS=6 ;; *) die "FAMILY is ipv4, dual, dual6 or ipv6, not $1" ;; esac
  API=https://$(endpoint "$(primary control-plane)" 6443)
}

# Units ----------------------------------------------------------------------------------------
# Everything that runs is a unit (netns, etcd, kube-apiserver, ..., node1, ...), and a unit is a
# cgroup v2 of its own below one named after this checkout's .run. Membership is inherited and cannot be
# lost, so stopping a unit ends exactly what it started: no pid file that may be late or stale.
GROUP=ctrlmesh-$(printf %s "${RUN%/.run}" | sha256sum | cut -c1-8)
if [ -f /sys/fs/cgroup/cgroup.controllers ]; then V2=/sys/fs/cgroup; else V2=/sys/fs/cgroup/unified; fi
UNITS=$V2/$GROUP
COMPONENTS="etcd kube-apiserver kube-controller-manager kube-scheduler"   # the programs
MEMBERS=$(seq -f member%g $MAX_MEMBERS | tr '\n' ' ')                        # apiservers of other clusters
CONTROL_PLANE="$COMPONENTS kube-apiserver2 $MEMBERS"

die() { echo "$(basename "$0"): $*" >&2; exit 1; }
need_root() { [ "$(id -u)" = 0 ] || die "needs root"; }
alive() { grep -qs '^populated 1' "$UNITS/${1-}/cgroup.events"; }   # alive [UNIT]
main_pid() { # main_pid UNIT: its first process, if that is still it
  local p; alive "$1" && p=$(cat "$RUN/units/$1") && grep -qs "^0::.*/$GROUP/$1" "/proc/$p/cgroup" && echo "$p"
}
waitfor() { # waitfor SECONDS COMMAND...
  local began=$SECONDS end=$((SECONDS + $1)) next=$((SECONDS + 15)); shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || return 1
    if [ $SECONDS -ge $next ]; then
      printf '          ... waiting for %s: %d s\n' "$*" $((SECONDS - began)) >&2
      next=$((SECONDS + 15))
    fi
    sleep 0.1
  done
}

# launch UNIT COMMAND...: start it in its unit, in a session of its own (Ctrl-C must not reach it).
# The process joins the cgroup before anything else, so it cannot be missed by down.sh.
launch() {
  local unit=$1; shift
  mkdir -p "$UNITS/$unit" "$RUN/units" "$RUN/logs"
  ( echo $BASHPID >"$UNITS/$unit/cgroup.procs"; echo $BASHPID >"$RUN/units/$unit"
    exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-   # locks that up.sh or its caller holds are not theirs
    exec setsid "$@"
  ) >>"$RUN/logs/$unit.log" 2>&1 </dev/null &
}

# remove_groups GROUP_DIR...: end what runs there, as a power cut would, and remove the groups.
remove_groups() {
  local d i
  for i in {1..50}; do
    for d in "$@"; do
      [ -d "$d" ] || continue
      # Version 1 groups have no cgroup.kill: theirs are the same processes, so they empty by themselves.
      [ ! -e "$d/cgroup.kill" ] || echo 1 >"$d/cgroup.kill" || true
      find "$d" -depth -type d -exec rmdir {} \; 2>/dev/null || true
    done
    for d in "$@"; do [ ! -d "$d" ] || { sleep 0.1; continue 2; }; done
    return 0
  done
  echo "still there: $*" >&2; return 1
}
stop() { # stop UNIT
  local dirs; mapfile -t dirs < <(find /sys/fs/cgroup -type d -path "*/$GROUP/$1" -prune)
  remove_groups "${dirs[@]}" && rm -f "$RUN/units/$1"
}
stop_all() {
  local dirs; mapfile -t dirs < <(find /sys/fs/cgroup -type d -name "$GROUP" -prune)
  remove_groups "${dirs[@]}"
  # Mounts, links and routes went with the namespaces. Logs, audit.log and pod logs are kept until the next up.
  rm -rf "$RUN"/{units,etcd,pki,port,family,kubeconfig,api-ready,kube-cache} "$RUN"/node*/{ovl,kubelet,containerd,ready}
}

# The control plane ----------------------------------------------------------------------------
in_netns() { nsenter -t "$(main_pid netns)" -n "$@"; }   # run in the control plane's network namespace

start_netns() { # the namespace with the bridge, and 127.0.0.1:PORT outside leading to the apiserver inside
  rm -f "$RUN/port"
  launch netns netfwd "${API_PORT:-0}" "$RUN/port" "${API#https://}"
  waitfor 15 test -s "$RUN/port" || die "no port to listen on: $(tail -n 1 "$RUN/logs/netns.log")"
  { echo "link set lo up"
    echo "link add k8s type bridge"
    for v in $IPS; do
      for who in control-plane second-apiserver $(seq -f "member:%g" $MAX_MEMBERS); do
        echo "addr add $(address "$v" "${who%:*}" "${who#*:}")/$(address "$v" length) dev k8s $(nodad "$v")"
      done
    done
    echo "link set k8s up"
    # The apiserver calls webhooks and aggregated APIs at pod addresses: a route for every node there may be.
    for i in $(seq $MAX_NODES); do routes_to "$i"; done
  } | in_netns ip -batch -
}
nodad() { [ "$1" = 4 ] || echo nodad; }   # duplicate address detection would keep an IPv6 address from use for a second
routes_to() { local v; for v in $IPS; do echo "route add $(address "$v" node-pods "$1") via $(address "$v" node "$1")"; done; }

has_gate() { "$RUN/bin/kube-apiserver" --help 2>&1 | grep "$1=" >/dev/null; }

start_component() {
  local P=$RUN/pki flags self audit=$RUN/audit.log program=${1%2}
  local as="--kubeconfig=$P/$1.kubeconfig --authentication-kubeconfig=$P/$1.kubeconfig --authorization-kubeconfig=$P/$1.kubeconfig"
  case $1 in
  etcd) flags="--name e --data-dir $RUN/etcd --log-level warn --unsafe-no-fsync
      --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379
      --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 --initial-cluster e=http://127.0.0.1:2380" ;;
  kube-apiserver | kube-apiserver2 | member[1-9])
      case $1 in
      kube-apiserver) self=$(primary control-plane) ;;
      kube-apiserver2) self=$(primary second-apiserver) ;;
      *) self=$(primary member "$1") audit=$RUN/audit-$1.log program=kube-apiserver ;;
      esac
      flags="--etcd-servers=http://127.0.0.1:2379
      --bind-address=$self --advertise-address=$self --secure-port=6443 --service-cluster-ip-range=$(addresses services | comma)
      --client-ca-file=$P/ca.crt --tls-cert-file=$P/apiserver.crt --tls-private-key-file=$P/apiserver.key
      --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true --enable-bootstrap-token-auth=true
      --kubelet-certificate-authority=$P/ca.crt --kubelet-preferred-address-types=InternalIP
      --kubelet-client-certificate=$P/apiserver-kubelet-client.crt --kubelet-client-key=$P/apiserver-kubelet-client.key
      --service-account-issuer=https://kubernetes.default.svc.cluster.local
      --service-account-key-file=$P/sa.pub --service-account-signing-key-file=$P/sa.key
      --requestheader-client-ca-file=$P/front-proxy-ca.crt --requestheader-allowed-names=front-proxy-client
      --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group --requestheader-extra-headers-prefix=X-Remote-Extra-
      --proxy-client-cert-file=$P/front-proxy-client.crt --proxy-client-key-file=$P/front-proxy-client.key
      --enable-aggregator-routing=true --shutdown-delay-duration=0s --v=1"   # aggregator routing: no kube-proxy here, so go to endpoints
      [ "${SHARDED:-on}" = off ] || ! has_gate ShardedListAndWatch || flags+=" --feature-gates=ShardedListAndWatch=true"
      [ "${AUDIT:-on}" = off ] || flags+=" --audit-policy-file=$HERE/manifests/audit-policy.yaml --audit-log-path=$audit
        --audit-log-format=json --audit-log-maxsize=1000000"   # in MB: 0 means 100, and tests must read what was recorded before a rotation
      flags+=" ${APISERVER_ARGS:-}"
      # A cluster of its own, without nodes and controllers. Nobody writes its endpoints.
      case $1 in member*) flags+=" --etcd-prefix=/$1 --endpoint-reconciler-type=none" ;; esac ;;
  kube-controller-manager) flags="$as --bind-address=127.0.0.1 --leader-elect=false --cluster-name=local --allocate-node-cidrs=false
      --use-service-account-credentials=true --service-account-private-key-file=$P/sa.key --root-ca-file=$P/ca.crt
      --cluster-signing-cert-file=$P/ca.crt --cluster-signing-key-file=$P/ca.key
      --client-ca-file=$P/ca.crt --requestheader-client-ca-file=$P/front-proxy-ca.crt
      --node-monitor-grace-period=${NODE_GRACE:-50s} --kube-api-qps=500 --kube-api-burst=1000 --v=1
      ${CONTROLLER_MANAGER_ARGS:-}" ;;   # the default 20 qps costs 4 s at start
  kube-scheduler) flags="$as --bind-address=127.0.0.1 --leader-elect=false --kube-api-qps=500 --kube-api-burst=1000 --v=1" ;;
  *) die "no such component: $1" ;;
  esac
  # shellcheck disable=SC2086
  launch "$1" nsenter -t "$(main_pid netns)" -n "$program" $flags
}

# Nodes ----------------------------------------------------------------------------------------
start_node() { # start_node NODE: boots it; `waitfor 60 test -e .run/NODE/ready` says when its runtime is up
  local node=$1 hierarchy controllers path dir
  [[ $node =~ ^node[1-$MAX_NODES]$ ]] || die "a node is called node1..node$MAX_NODES, not $node"
  mkdir -p "$RUN/$node/logs"; rm -f "$RUN/$node/ready"; : >"$RUN/logs/$node.log"
  local groups=("$UNITS/$node")
  if [ $V2 = /sys/fs/cgroup ]; then
    # Pure version 2: hand every controller down to the node.
    for dir in $V2 "$UNITS"; do mkdir -p "$dir"; sed 's/\</+/g' "$dir/cgroup.controllers" >"$dir/cgroup.subtree_control"; done
  else
    # Version 1 hierarchies: a group in each, below the caller's own, so that limits set on us hold for the node.
    while IFS=: read -r hierarchy controllers path; do
      [ "$hierarchy" != 0 ] || continue
      dir=/sys/fs/cgroup/${controllers#name=}${path%/}
      mkdir -p "$dir/$GROUP/$node"; groups+=("$dir/$GROUP/$node")
      [ "$controllers" != cpuset ] || for f in cpuset.cpus cpuset.mems; do   # a new cpuset is empty and takes nobody
        cat "$dir/$f" >"$dir/$GROUP/$f"; cat "$dir/$f" >"$dir/$GROUP/$node/$f"; done
    done </proc/self/cgroup
  fi
  # The cgroup namespace takes its roots from where the process is when it is made, hence join first.
  # fd 8 is the control plane's network namespace: node-init.sh plugs the node's cable into its bridge.
  # shellcheck disable=SC2016
  launch "$node" bash -c 'n=$1 pid=$2; shift 2; for g; do echo $$ >"$g/cgroup.procs" || exit; done
    exec 8<"/proc/$pid/ns/net"
    exec unshare --mount --uts --ipc --net --pid --cgroup --fork --kill-child=KILL --mount-proc "$HERE/node-init.sh" "$n"' \
    - "$node" "$(main_pid netns)" "${groups[@]}"
}
in_node() { # in_node NODE COMMAND...
  local p; p=$(main_pid "$1") || die "$1 is not running"
  p=$(tr -d ' ' <"/proc/$p/task/$p/children")   # the main process is unshare, its child the node's PID 1
  shift; nsenter -t "$p" -m -u -i -n -p -C -- "$@"
}
running_nodes() { local n; for n in $(seq -f node%g $MAX_NODES); do ! alive "$n" || echo "$n"; done; }

use_family "$(cat "$RUN/family" 2>/dev/null || true)"
