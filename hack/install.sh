#!/bin/bash
# Installs the mesh into the cluster of tests/cluster as a user would, with an access line per request.
# Images keep their tag over builds, so pods that run an older build are restarted.
set -euo pipefail
cd "$(dirname "$0")/.."
shopt -s nullglob
# shellcheck source=progress.sh
. hack/progress.sh
progress "loading the images" tests/cluster/load.sh bin/images/*.tar .run/images/*.tar
mesh="kubectl -n ctrlmesh-system"
built=$(cat bin/images/*.tar | sha256sum | cut -c1-16)
running=$($mesh get daemonset ctrlmesh-agent --ignore-not-found -o jsonpath='{.metadata.name} {.metadata.annotations.built}' 2>/dev/null || true)
progress "applying the manifests" kubectl apply -k deploy/debug >/dev/null
progress "applying the policies" hack/policies.sh apply >/dev/null
$mesh annotate --overwrite daemonset/ctrlmesh-agent built="$built" >/dev/null
if [ -n "$running" ] && [ "$running" != "ctrlmesh-agent $built" ]; then
  $mesh rollout restart deployment/ctrlmesh-manager daemonset/ctrlmesh-agent
fi
# shellcheck disable=SC2086
progress "waiting for the manager" $mesh rollout status deployment/ctrlmesh-manager --timeout=360s
# shellcheck disable=SC2086
progress "waiting for the agents" $mesh rollout status daemonset/ctrlmesh-agent --timeout=360s
