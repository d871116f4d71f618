#!/bin/bash
# Builds the images from bin/ as archives, as docker save writes them, into bin/images/: no registry and no Docker needed.
# Push one with any tool (crane push, skopeo copy docker-archive:..., docker load and push), or load it into containerd.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=../../hack/progress.sh
. hack/progress.sh
image() { progress "packing $1" tests/cluster/image.sh "$@" >/dev/null; }
mkdir -p bin/images
image localhost/ctrlmesh/manager:dev bin/images/manager.tar -user 65532 -entrypoint /ctrlmesh-manager \
  bin/ctrlmesh-manager=/ctrlmesh-manager
# iptables is dynamically linked; its extensions are loaded by name.
xtables=$(echo /usr/lib/*-linux-gnu/xtables)
nft=/usr/sbin/xtables-nft-multi
links=()
for name in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore; do
  links+=("usr/sbin/$name@xtables-nft-multi")
done
# Under these names the agent runs iptables with bounds; see agent/capture/program.
for name in iptables ip6tables; do links+=("usr/sbin/$name-bounded@/ctrlmesh-agent"); done
# The public CAs verify other hosts whose TLS is decrypted.
roots=/etc/ssl/certs/ca-certificates.crt
image localhost/ctrlmesh/agent:dev bin/images/agent.tar -entrypoint /ctrlmesh-agent \
  -with-libs $nft -with-libs $xtables "${links[@]}" $roots=$roots bin/ctrlmesh-agent=/ctrlmesh-agent
