#!/bin/bash
# node.sh start UNIT         boot a node, or start a component of the control plane; waits until it is up
# node.sh stop UNIT          cut it off, as a power failure would; a node keeps its disk
# node.sh shutdown UNIT      end a component of the control plane in order: it has 10 s for that
# node.sh restart NODE PART  end containerd or kubelet on a node and wait for the next; pods stay
# node.sh load NODE TAR...   load images into its container runtime
# node.sh exec NODE CMD...   run a command on the node; NODE may be "netns": the control plane's network
# node.sh logs NODE          the directory, outside the node, with its container logs: NAMESPACE_POD_UID/CONTAINER/N.log
# node.sh snapshot etcd FILE save all that etcd has, as a backup does
# node.sh restore etcd FILE  go back to a backup: the control plane is started anew with what it has
# node.sh list               what runs
# A UNIT is node1..node9, etcd, kube-apiserver, kube-apiserver2, kube-controller-manager, kube-scheduler
# or member1..member4.
# shellcheck source=lib.sh
. "$(dirname "$(readlink -f "$0")")/lib.sh"
usage() { sed -n '2,/^# or member1/s/^# //p' "$0" >&2; exit 2; }
[ $# -gt 1 ] || [ "${1-}" = list ] || usage
need_root
do=$1 unit=${2-}; shift $(($# > 1 ? 2 : 1))
case $do in
start)
  alive netns || die "the cluster is not up"
  ! alive "$unit" || die "$unit is running"
  case $unit in
  node*)
    start_node "$unit"
    waitfor 180 test -e "$RUN/$unit/ready" || { tail -n 5 "$RUN/logs/$unit.log" >&2; die "$unit does not come up"; } ;;
  *)
    start_component "$unit"
    ready=(kubectl get --raw=/readyz --request-timeout=2s)
    case $unit in
    kube-apiserver2) ready=(in_netns "${ready[@]}" --server="https://$(endpoint "$(primary second-apiserver)" 6443)") ;;
    member*) ready=(in_netns "${ready[@]}" --server="https://$(endpoint "$(primary member "$unit")" 6443)") ;;
    esac
    [ "$unit" = etcd ] || waitfor 180 "${ready[@]}" || die "the apiserver is not ready" ;;
  esac ;;
shutdown)
  case " $CONTROL_PLANE " in *" $unit "*) alive "$unit" || die "$unit does not run" ;; *) usage ;; esac
  kill "$(main_pid "$unit")"
  ended() { ! alive "$unit"; }
  waitfor 10 ended || true   # an apiserver waits for the watches of others for longer
  stop "$unit" ;;
restart)
  part=${1-}
  case $part in
  containerd) serves=(ctr version) ;;
  kubelet) serves=(busybox wget -qO /dev/null http://127.0.0.1:10248/healthz) ;;
  *) usage ;;
  esac
  pid=$(in_node "$unit" cat "/run/$part.pid")
  in_node "$unit" kill "$pid"
  next() { [ "$(in_node "$unit" cat "/run/$part.pid")" != "$pid" ] && in_node "$unit" timeout 5 "${serves[@]}"; }
  waitfor 180 next || { tail -n 5 "$RUN/$unit/logs/$part.log" >&2; die "$part does not come back on $unit"; } ;;
stop) case " $CONTROL_PLANE $(running_nodes | tr '\n' ' ')" in *" $unit "*) stop "$unit" ;; *) die "$unit does not run" ;; esac ;;
load) for tar; do in_node "$unit" ctr -n k8s.io images import --local "$(readlink -f "$tar")" 2>&1 >/dev/null | { grep -v DEPRECATION >&2 || true; }; done ;;
exec) if [ "$unit" = netns ]; then in_netns "$@"; else in_node "$unit" "$@"; fi ;;
logs) echo "$RUN/$unit/pods" ;;
snapshot)
  "$HERE/build.sh" etcd >/dev/null
  in_netns "$RUN/bin/etcdbackup" save "$1" ;;
restore)
  "$HERE/build.sh" etcd >/dev/null
  rm -rf "$RUN/etcd.new"
  "$RUN/bin/etcdbackup" restore "$1" "$RUN/etcd.new"
  # Every component that has seen later revisions is started anew, as Kubernetes' documentation asks.
  parts="kube-apiserver kube-controller-manager kube-scheduler"
  for part in $parts etcd; do stop "$part"; done
  rm -rf "$RUN/etcd"; mv "$RUN/etcd.new" "$RUN/etcd"
  for part in etcd kube-apiserver; do start_component "$part"; done
  ready=(kubectl get --raw=/readyz --request-timeout=2s)
  waitfor 180 "${ready[@]}" || die "the apiserver is not ready"
  # They exit if the apiserver is not ready within 10 s, and nothing would start them again.
  for part in kube-controller-manager kube-scheduler; do start_component "$part"; done ;;
list) for unit in netns $CONTROL_PLANE $(running_nodes); do ! alive "$unit" || echo "$unit"; done ;;
*) usage ;;
esac
