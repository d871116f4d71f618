#!/bin/bash
# node-init.sh NODE: PID 1 of a node, in private mount, uts, ipc, net, pid and cgroup namespaces.
# shellcheck source=lib.sh
. "$(dirname "$(readlink -f "$0")")/lib.sh"
N=$1 D=$RUN/$1

# Mounts. The inherited cgroup views go first: runtimes parse mountinfo and stumble over roots like "/..".
umount -R -l /sys
mount -t sysfs sysfs /sys
if [ $V2 = /sys/fs/cgroup ]; then
  mount -t cgroup2 cgroup2 $V2
  mkdir $V2/init   # a group that hands controllers down may hold no process itself
  while read -r p; do echo "$p" >$V2/init/cgroup.procs 2>/dev/null || true; done <$V2/cgroup.procs
  sed 's/\</+/g' $V2/cgroup.controllers >$V2/cgroup.subtree_control
else
  mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
  while IFS=: read -r hierarchy controllers _; do
    [ "$hierarchy" != 0 ] || continue
    dir=/sys/fs/cgroup/${controllers#name=}; mkdir "$dir"
    case $controllers in name=*) controllers=none,$controllers ;; esac
    mount -t cgroup -o "$controllers" cgroup "$dir"
    # Beside the group of all pods each thread would weigh as much as half of them. As on other nodes, the
    # runtime and the kubelet share one group.
    [[ ,$controllers, != *,cpu,* ]] || { mkdir "$dir/system"; echo $$ >"$dir/system/cgroup.procs"; }
  done </proc/self/cgroup
  mkdir $V2; mount -t cgroup2 cgroup2 $V2   # its root is the node's own: BPF programs attached there see this node only
fi
mount -t bpf -o mode=700 bpf /sys/fs/bpf
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/lock
for d in etc var opt; do
  mkdir -p "$D/ovl/$d.u" "$D/ovl/$d.w"
  mount -t overlay -o "lowerdir=/$d,upperdir=$D/ovl/$d.u,workdir=$D/ovl/$d.w" overlay /$d
done
# Real directories, for an overlay cannot be the lower layer's upper again; the logs also to be read from outside.
for d in kubelet:/var/lib/kubelet containerd:/var/lib/containerd pods:/var/log/pods; do
  mkdir -p "$D/${d%%:*}" "${d##*:}"; mount --bind "$D/${d%%:*}" "${d##*:}"
done
mkdir -p /etc/cni/net.d /opt/cni/bin /etc/kubernetes/manifests /var/log/containers
mount --bind "$RUN/parts/cni" /opt/cni/bin
mkdir /run/.proc; mount -t proc proc /run/.proc   # a second, unmasked proc: the kernel wants one for pods with user namespaces
# kubelet would write these tunables, which are the whole machine's: give it files that hold what it wants.
for kv in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1; do
  f=/run/sysctl.${kv##*/}; echo "${kv##*=}" >"$f"; mount --bind "$f" "/proc/sys/${kv%%=*}"
done
mount --make-rshared /
hostname "$N"; echo "$N" >/etc/hostname
{ echo "127.0.0.1 localhost"; echo "::1 localhost"; for ip in $(addresses node "$N"); do echo "$ip $N"; done; } >/etc/hosts
rm -f /etc/resolv.conf; : >/etc/resolv.conf   # nothing upstream

# Network. The cable is made from the bridge's end; both ends vanish with this namespace. The node's link-layer
# address stays: after a reboot others would send to the old one for some 8 s.
nsenter --net=/proc/self/fd/8 sh -c "ip link add $N type veth peer name eth0 address 02:00:00:00:00:0${N#node} netns $$ && ip link set $N master k8s up"
exec 8<&-
{ echo "link set lo up"; echo "link set eth0 up"
  for v in $IPS; do
    echo "addr add $(address "$v" node "$N")/$(address "$v" length) dev eth0 $(nodad "$v")"
    echo "route add $(address "$v" any) via $(address "$v" control-plane)"
  done
  for i in $(seq $MAX_NODES); do [ "node$i" = "$N" ] || routes_to "$i"; done
} | ip -batch -
for f in ipv4/ip_forward ipv6/conf/all/forwarding; do echo 1 >/proc/sys/net/$f; done   # the node's own
echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad   # as nodad above, for the bridge that the CNI makes

ranges=$(addresses node-pods "$N" | sed 's/.*/[{"subnet": "&"}]/' | comma)
routes=$(addresses any | sed 's/.*/{"dst": "&"}/' | comma)
cat >/etc/cni/net.d/10-bridge.conflist <<C
{"cniVersion": "1.0.0", "name": "k8s", "plugins": [
 {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
  "ipam": {"type": "host-local", "ranges": [$ranges], "routes": [$routes]}},
 {"type": "portmap", "capabilities": {"portMappings": true}}]}
C
# restrict_oom_score_adj, oomScoreAdj, maxOpenFiles, conntrack: so that it works without CAP_SYS_RESOURCE
# and outside the first network namespace. NRI is left as containerd has it (on, /run/nri/nri.sock).
cat >/etc/containerd.toml <<C
version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "localhost/pause:1"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  options = {BinaryName = "$RUN/bin/runc", SystemdCgroup = false}
C
cat >/etc/kubernetes/kubelet.yaml <<C
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: $RUN/pki/ca.crt}
authorization: {mode: Webhook}
tlsCertFile: $RUN/pki/$N-serving.crt
tlsPrivateKeyFile: $RUN/pki/$N-serving.key
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
failCgroupV1: false
clusterDNS: ["$(primary dns)"]
clusterDomain: cluster.local
resolvConf: /etc/resolv.conf
maxOpenFiles: 20000
oomScoreAdj: 0
staticPodPath: /etc/kubernetes/manifests
enforceNodeAllocatable: [pods]
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, nodefs.inodesFree: 1%, imagefs.available: 1%}
imageGCHighThresholdPercent: 100
nodeStatusUpdateFrequency: 5s
syncFrequency: 10s
containerLogMaxSize: 100Mi                        # a test wants its whole log
featureGates: {KubeletCrashLoopBackOffMax: true} # which 1.34 does not have on
crashLoopBackOff: {maxContainerRestartPeriod: 2s} # and no waiting for minutes
C
cat >/etc/kubernetes/kube-proxy.yaml <<C
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: ${PROXY_MODE:-nftables}
clientConnection: {kubeconfig: $RUN/pki/kube-proxy.kubeconfig}
clusterCIDR: $(addresses pods | comma)
hostnameOverride: $N
oomScoreAdj: 0
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
C

# part NAME COMMAND...: kept running, as systemd would; what it started itself outlives it.
part() {
  while :; do
    ( echo $BASHPID >"/run/$1.pid"; exec "${@:2}" ) >>"$D/logs/$1.log" 2>&1 || true
    sleep 0.2
  done &
}
part containerd containerd -c /etc/containerd.toml
waitfor 90 ctr version
if [ ! -e "$D/containerd/preloaded" ]; then
  for i in "$RUN"/parts/images/*.tar; do ctr -n k8s.io images import --local "$i"; done >>"$D/logs/containerd.log" 2>&1
  touch "$D/containerd/preloaded"
fi
touch "$D/ready"
waitfor 360 test -e "$RUN/api-ready"
# shellcheck disable=SC2086
part kubelet kubelet --config=/etc/kubernetes/kubelet.yaml --kubeconfig="$RUN/pki/$N.kubeconfig" --hostname-override="$N" \
  --node-ip="$(addresses node "$N" | comma)" --v=2 ${KUBELET_ARGS:-}
part kube-proxy kube-proxy --config=/etc/kubernetes/kube-proxy.yaml --v=2
while :; do wait -n || sleep 0.2; done   # PID 1 reaps
