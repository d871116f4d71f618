#!/bin/bash
# Makes the generated code. With --check: in a copy, and fails where it differs from the tree. A check that
# passed is not repeated while inputs, results and generators stay the same.
set -euo pipefail
cd "$(dirname "$0")/.."
protoc_gen_go=v1.36.12 protoc_gen_go_grpc=v1.6.2 controller_gen=v0.21.0 crd_ref_docs=v0.3.0

cache=${CTRLMESH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ctrlmesh}
if [ "${1:-}" = --check ]; then
  sum=$({ find go.mod go.sum api bpf deploy docs hack -type f -print0 | sort -z | xargs -0 sha256sum; clang --version; protoc --version; } | sha256sum | cut -c1-32)
  passed=$cache/generated-$sum
  [ ! -e "$passed" ] || { echo "generated code was checked before"; exit 0; }
fi

tools=$cache/generate-$protoc_gen_go-$protoc_gen_go_grpc-$controller_gen-$crd_ref_docs
if [ ! -d "$tools" ]; then
  echo "building the generators"
  new=$tools.new.$$; trap 'rm -rf "$new"' EXIT
  GOBIN=$new GOWORK=off hack/retry.sh go install google.golang.org/protobuf/cmd/protoc-gen-go@$protoc_gen_go
  GOBIN=$new GOWORK=off hack/retry.sh go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@$protoc_gen_go_grpc
  GOBIN=$new GOWORK=off hack/retry.sh go install sigs.k8s.io/controller-tools/cmd/controller-gen@$controller_gen
  GOBIN=$new GOWORK=off hack/retry.sh go install github.com/elastic/crd-ref-docs@$crd_ref_docs
  mv -T "$new" "$tools" || [ -d "$tools" ]
fi
export PATH=$tools:$PATH
helm=$(hack/tools.sh helm)

if [ "${1:-}" = --check ]; then
  tree=$PWD copy=$(mktemp -d)
  trap 'rm -rf "$copy"' EXIT
  cp -a go.mod go.sum api bpf deploy docs hack "$copy"
  cd "$copy"
fi

protoc --go_out=. --go_opt=module=github.com/ctrlmesh/ctrlmesh \
  --go-grpc_out=. --go-grpc_opt=module=github.com/ctrlmesh/ctrlmesh api/mesh/v1/mesh.proto api/mesh/v1/traffic.proto
controller-gen object paths=./api/... crd paths=./api/... output:crd:dir=deploy/crd
go run ./hack/crdbounds deploy/crd/*_*.yaml
go generate ./bpf/...
"$helm/render" deploy/chart deploy
"$helm/values" deploy/chart/values.yaml docs/values.md
log=$(crd-ref-docs --source-path=api/ctrlmesh/v1alpha1 --config=hack/fields/config.yaml --templates-dir=hack/fields/templates \
  --renderer=markdown --output-path=docs/fields.md --max-depth=20 2>&1) || { echo "$log" >&2; exit 1; }

if [ "${1:-}" = --check ]; then
  for d in api bpf deploy docs; do
    diff -r "$tree/$d" "$d" || { echo "generated code is out of date: run make generate" >&2; exit 1; }
  done
  touch "$passed"
fi
