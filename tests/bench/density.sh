#!/bin/bash
# density.sh [FLAGS]: an agent with a full node of captured pods, on a cluster of its own with one
# node that takes as many: ends the one that runs. FLAGS are those of tests/bench/density.
set -euo pipefail
cd "$(dirname "$0")/../.."
export KUBECONFIG=$PWD/.run/kubeconfig PATH=$PWD/.run/bin:$PATH
mkdir -p .run
CGO_ENABLED=0 go build -o .run/bench ./tests/bench
CGO_ENABLED=0 go build -o .run/density ./tests/bench/density
tests/cluster/down.sh
trap 'tests/cluster/down.sh' EXIT
trap 'exit 130' INT TERM
KUBELET_ARGS=--max-pods=130 tests/cluster/up.sh 1   # with the mesh's own and the cluster's
hack/install.sh
tests/cluster/image.sh localhost/ctrlmesh/bench:dev .run/bench.tar -entrypoint /bench .run/bench=/bench >/dev/null
tests/cluster/load.sh .run/bench.tar
.run/density "$@"
